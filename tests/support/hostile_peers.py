"""The peers of a fuzz: those that send what no client would, one that works as it should, and passers-by."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import zmq
from daemons import Daemon
from fuzzing import MessageFuzzer, Target, check_reply, is_allowed
from soaking import RawSession

from mambapool.client.lease import Lease
from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.pool.protocol import pack

#: Of a daemon's pool ``default``, and of the neighbour's own.
SLOTS = 32
NEIGHBOUR_SLOTS = 16

BURST = 250
#: So many of a session's messages go out before its state is looked at again.
FEW = 8
ANSWER_S = 20.0


class Peer:
    """Sends bursts of bad messages; everything that can be answered is, and in time."""

    def __init__(self, daemon: Daemon, fuzzer: MessageFuzzer, chance: random.Random) -> None:
        self._daemon = daemon
        self._fuzzer = fuzzer
        self._chance = chance
        self._context = zmq.Context()
        self._lease = Lease(daemon.directory)
        self._table = st.SlotTableReader(daemon.directory.slot_table("default"))
        self._row = 0
        self._fence = 2**40
        self._connect()
        self.target = Target(0, 0, SLOTS, self._lease.name, self._applied)
        self.attached = False
        self.sent = 0
        self.replies = 0
        self.statuses: Counter[int] = Counter()

    def attach(self) -> None:
        """A session of its own; again after it was left or evicted, or the connection was cut."""
        self.attached = True
        hello = {"versions": [1, 1], "lease": self._lease.name, "pool": "default", "name": "hostile", "pid": 1}
        for fields in self._ask(pack((protocol.HELLO, 0, 1, 0, 0, 0, {**hello, "rank": 0, "guarantee": 0}))):
            session = fields[3] if fields[2] == protocol.OK and len(fields) == 4 else None
            if isinstance(session, dict) and session.get("table") == "default.table":
                self.target.session, self.target.epoch = session["session"], fields[1]
                self._row = session["row"]

    def burst(self, protected: list[int]) -> None:
        """Without a session many at once; with one few, for most depend on what became of those before."""
        for _ in range(1 if not self.attached else BURST // FEW):
            self._send_some(protected, FEW if self.attached else BURST)

    def _send_some(self, protected: list[int], count: int) -> None:
        target = self.target if self.attached else None
        if target is not None and self._table.session_number(self._row) != target.session:
            self.attach()
        bodies = (self._fuzzer.body(target) for _ in range(count))
        allowed = [body for body in bodies if is_allowed(body, protected)]
        if self._chance.random() < 0.001:
            allowed.append(bytes(self._chance.choice((70_000, 1 << 20, 5 << 20))))
        self.sent += len(allowed)
        answers = self._ask(*allowed)
        self.replies += len(answers)
        for fields in answers:
            self.statuses[int(fields[2])] += 1
        if target is not None and any(fields[2] == protocol.UNKNOWN_SESSION for fields in answers):
            self.attach()

    def close(self) -> None:
        self._lease.close()
        self._dealer.close(linger=0)
        self._context.term()

    def _ask(self, *bodies: bytes) -> list[list[Any]]:
        """What comes back up to the answer to a STATUS; asked again when the daemon has cut the connection."""
        for body in bodies:
            self._dealer.send(body)
        found: list[list[Any]] = []
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            self._fence += 1
            self._dealer.send(pack((protocol.STATUS, 0, self._fence, 0, 0, 0)))
            with contextlib.suppress(zmq.Again):
                while True:
                    fields = check_reply(self._dealer.recv())
                    if fields[0] == self._fence:
                        assert fields[2] == protocol.OK, fields
                        return found
                    found.append(fields)
        raise AssertionError(f"the daemon did not answer a STATUS within {ANSWER_S:g} s")

    def _connect(self) -> None:
        self._dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._dealer.linger = 0
        self._dealer.sndtimeo = int(ANSWER_S * 1000)
        self._dealer.rcvtimeo = 1000
        self._dealer.connect(self._daemon.directory.endpoint)

    def _applied(self) -> int:
        return self._table.items[self._table.layout.session(self._row) + st.S_APPLIED]


class Neighbour:
    """A client as it should be, in a pool of its own; its counts have to be exact all the time."""

    def __init__(self, directory: Path) -> None:
        self._session = RawSession(directory, "neighbour", create_slots=NEIGHBOUR_SLOTS)
        greeting = self._session.hello()
        assert greeting[0] == protocol.OK, greeting
        self.number = self._session.number

    def round(self) -> None:
        all_of_them = self._session.ask(protocol.ALLOC, NEIGHBOUR_SLOTS, None, False)
        assert all_of_them[0] == protocol.OK, all_of_them
        assert sorted(all_of_them[1]) == list(range(1, NEIGHBOUR_SLOTS + 1)), all_of_them
        assert self._session.ask(protocol.ALLOC, 1, None, False) == [protocol.NONE]
        self._session.post(protocol.FREE, all_of_them[1])

    def close(self) -> None:
        assert self._session.ask(protocol.DETACH) == [protocol.OK]
        self._session.close()


def send_garbage(daemon: Daemon, chance: random.Random) -> None:
    """Not even ZeroMQ, or only its beginning; to each of the sockets."""
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL" + bytes(16) + b"\0" + bytes(31)
    for path, kind in (
        (daemon.directory.allocator_socket, socket.SOCK_STREAM),
        (daemon.directory.lease_socket, socket.SOCK_SEQPACKET),
    ):
        with socket.socket(socket.AF_UNIX, kind) as stranger, contextlib.suppress(OSError):
            stranger.settimeout(1.0)
            stranger.connect(str(path))
            stranger.sendall(
                chance.choice((b"", greeting, greeting[:30])) + chance.randbytes(chance.randrange(999))
            )


def vanish(daemon: Daemon, chance: random.Random) -> None:
    """Attach, take everything, leave without a word, or ask a lot and never read."""
    session = RawSession(daemon.dir, "made", create_slots=100)
    if session.hello()[0] == protocol.OK:
        session.send(protocol.ALLOC, 100, None, False)
        for _ in range(chance.choice((0, 0, 1500))):
            session.repeat()
    session.close()
