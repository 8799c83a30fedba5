"""Processes that are killed: clients without torch, message by message; what they leave, looked at from outside."""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import zmq
from commands import children_of

from mambapool.client.lease import Lease
from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.pool.runtime_dir import RuntimeDir

if TYPE_CHECKING:
    from processes import Child  # brings pytest, which takes a script a third of a second

WAIT_S = 20.0

#: A field of a message as JSON has it: ids are a list.
Plain: TypeAlias = Any

#: Fields of a greeting that no restart changes.
_LASTING = ("session", "applied", "granted", "guarantee")


class RawSession:
    """One session whose every message a test sends and receives by itself. Takes and returns plain JSON values.

    Knows what a client has to know to come back: its lease, what it posted, its last request.
    """

    def __init__(
        self, directory: str | Path, pool: str = "default", *, create_slots: int | None = None, guarantee: int = 0
    ) -> None:
        self._directory = RuntimeDir(Path(directory))
        self._context = zmq.Context()
        self._lease = Lease(self._directory)
        self._connect()
        self._hello = {
            "versions": [protocol.OLDEST_VERSION, protocol.NEWEST_VERSION],
            "lease": self._lease.name,
            "pool": pool,
            "name": f"raw-{os.getpid()}",
            "pid": os.getpid(),
            "rank": 0,
            "guarantee": guarantee,
            "create_slots": create_slots,
        }
        self.number = 0
        self.epoch = 0
        self.posted = 0
        #: Bodies in the order in which they were sent.
        self.sent: list[bytes] = []
        self._request = 0
        self._last: tuple[int, tuple[Plain, ...]] = (protocol.HELLO, ())
        self._messages: dict[int, tuple[int, Plain]] = {}

    def hello(self) -> Plain:
        """Attach, or come back to an allocator that knows this session."""
        self.send_hello()
        return self.receive()

    def send_hello(self) -> None:
        self._request += 1
        self._last = (protocol.HELLO, ())
        self.repeat()

    def send(self, op: int, *arguments: Plain) -> None:
        """A new request; its reply is left to :meth:`receive`."""
        self._request += 1
        self._last = (op, arguments)
        self.repeat()

    def repeat(self) -> None:
        """Send the last request, under its old id."""
        op, arguments = self._last
        if op == protocol.HELLO:
            resume = {"resume": self.number} if self.number else {}
            self._send((op, 0, self._request, 0, 0, 0, self._hello | resume))
        else:
            header = (op, self.number, self._request, self.epoch, self.posted, self._request)
            self._send((*header, *map(_packed, arguments)))

    def post(self, op: int, argument: Plain) -> None:
        self.posted += 1
        self._messages[self.posted] = (op, argument)
        self._send_posted(self.posted)

    def receive(self, timeout: float = WAIT_S) -> Plain:
        """``[status, …]`` of the reply to the last request, or of a notice; None: nothing came in time."""
        if not self._socket.poll(int(timeout * 1000)):
            return None
        body = self._socket.recv()
        known, epoch, status, *payload = protocol.unpack(body, len(body))
        if known and known != self._request:
            return self.receive(timeout)
        if self._last[0] == protocol.HELLO and status == protocol.OK:
            self.epoch, self.number = epoch, payload[0]["session"]
            payload = [{key: _plain(payload[0][key]) for key in _LASTING if key in payload[0]}]
        return [status, *map(_plain, payload)]

    def ask(self, op: int, *arguments: Plain) -> Plain:
        self.send(op, *arguments)
        return self.receive()

    def arrived(self, timeout: float = 0.0) -> bool:
        """Whether something can be received."""
        return bool(self._socket.poll(int(timeout * 1000)))

    def come_back(self) -> Plain:
        """What a client does after a restart: a new connection, HELLO, what was posted and is not applied."""
        self._socket.close(linger=0)
        self._connect()
        request, last = self._request, self._last
        greeting = self.hello()
        if last[0] != protocol.HELLO:
            self._last = last
            self._request = request
        if greeting is not None and greeting[0] == protocol.OK:
            for number in range(greeting[1]["applied"] + 1, self.posted + 1):
                self._send_posted(number)
        return greeting

    def flush(self) -> None:
        """Hand everything to the kernel, which delivers it whatever becomes of this process; sends no more."""
        self._socket.close(linger=int(WAIT_S * 1000))
        self._context.term()

    def send_body(self, body: bytes) -> None:
        """Bytes as they are."""
        self._socket.send(body)

    def exchange(self, body: bytes) -> Plain:
        """Send bytes as they are; ``[status, …]`` of what comes next, whatever it answers."""
        self.send_body(body)
        assert self.arrived(WAIT_S), "nothing came back"
        answer = self._socket.recv()
        return protocol.unpack(answer, len(answer))[2:]

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        self._lease.close()

    def _connect(self) -> None:
        self._lease.connect()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(self._directory.endpoint)

    def _send_posted(self, number: int) -> None:
        op, argument = self._messages[number]
        self._send((op, self.number, 0, self.epoch, number, 0, _packed(argument)))

    def _send(self, fields: Sequence[Plain]) -> None:
        self.sent.append(protocol.pack(fields))
        self._socket.send(self.sent[-1])


def _packed(value: Plain) -> Plain:
    return np.array(value, "<i4").tobytes() if isinstance(value, list) else value


def _plain(value: Plain) -> Plain:
    return protocol.unpack_ids(value).tolist() if isinstance(value, bytes) else value


def serve_raw_sessions() -> None:
    """For a script: ``{"session", "call", "arguments", "options"}`` a line on stdin, the result on stdout."""
    sessions: dict[str, RawSession] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        key, call = asked["session"], asked["call"]
        if call == "RawSession":
            sessions[key] = RawSession(*asked["arguments"], **asked["options"])
            result = None
        else:
            result = getattr(sessions[key], call)(*asked["arguments"])
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


class Progress:
    """A page that clients write and the soak reads: per place the session, the epoch as it was before a call that was
    answered, and when the first such call of that epoch was, in nanoseconds of the monotonic clock."""

    WORDS = 3

    def __init__(self, path: str | Path, places: int) -> None:
        with open(path, "a+b") as file:
            file.truncate(places * self.WORDS * 8)
            words: npt.NDArray[np.int64] = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)
        self._words = words.reshape(places, self.WORDS)

    def answered(self, place: int, session: int, epoch: int) -> None:
        if self._words[place, 0] != session or self._words[place, 1] != epoch:
            self._words[place] = session, epoch, time.monotonic_ns()

    def epoch_and_time_ns(self, place: int) -> tuple[int, int]:
        _, epoch, when = self._words[place].tolist()
        return epoch, when


class RemoteSession:
    """A :class:`RawSession` in a process of its own, which several of them may share."""

    def __init__(self, child: Child, key: str, *arguments: Plain, **options: Plain) -> None:
        self._child = child
        self._key = key
        self._do("RawSession", arguments, options)

    def do(self, call: str, *arguments: Plain) -> Plain:
        """Call a method there; what it returns."""
        return self._do(call, arguments, {})

    def _do(self, call: str, arguments: tuple[Plain, ...], options: dict[str, Plain]) -> Plain:
        asked = {"session": self._key, "call": call, "arguments": arguments, "options": options}
        self._child.say(json.dumps(asked))
        return json.loads(self._child.hear())


def holders(table: st.SlotTableReader) -> list[int]:
    """The session that holds each slot, 0 where it is free; index 0 is the reserved row."""
    at = table.layout.field(st.OWNER)
    listed: list[int] = (table.words[at : at + table.layout.slots + 1] >> np.uint64(8)).tolist()
    return listed


def sessions(table: st.SlotTableReader) -> dict[int, int]:
    """Who is attached, by number → row."""
    layout = table.layout
    words = table.words[layout.sessions :][: layout.max_sessions * st.SESSION_WORDS]
    numbers = words[st.S_NUMBER :: st.SESSION_WORDS]
    return {int(numbers[row]): int(row) for row in np.flatnonzero(numbers)}


def applied(table: st.SlotTableReader, session: int) -> int:
    """Number of the last posted message of a session that was applied."""
    return table.items[table.layout.session(sessions(table)[session]) + st.S_APPLIED]


def audit(table: st.SlotTableReader) -> bool:
    """Hold one moment of a table that changes meanwhile to the invariants; False: no such moment was to be had."""
    layout = table.layout
    done = table.items[st.H_DONE]
    words = table.words[: layout.redo].copy()
    if table.items[st.H_SEQ] != done:
        return False
    owners, _, generations, orders, offers = (
        words[layout.field(field) :][: layout.slots + 1] for field in range(st.ROW_FIELDS)
    )
    attached = set(words[layout.sessions :][: layout.max_sessions * st.SESSION_WORDS : st.SESSION_WORDS].tolist())
    free = np.flatnonzero(owners[1:] == 0) + 1
    assert owners[0] == generations[0] == offers[0] == 0, "the reserved row was handed out"
    assert len(free) == words[st.H_FREE_COUNT], f"{len(free)} rows are free, {words[st.H_FREE_COUNT]} counted"
    assert len(np.unique(orders[free])) == len(free), "two free slots have one place in the list"
    strangers = set((owners[owners != 0] >> np.uint64(8)).tolist()) - attached
    assert not strangers, f"sessions {strangers} hold slots and are not attached"
    assert not offers[free].any(), "a free slot is on offer"
    missed = set((offers[offers != 0] & np.uint64(st.RECEIVER_BITS)).tolist()) - attached
    assert not missed, f"slots are offered to sessions {missed}, which are not attached"
    return True


def allocator_processes(serve_pid: int) -> list[int]:
    """The allocators that ``serve`` has started and that live, whether they answer or not yet."""
    found = []
    for pid in children_of(serve_pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"mambapool.service.allocator_process" in command:
            found.append(pid)
    return found


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that so large a part of all does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)] if ordered else 0.0
