"""Everything that a socket can bring, at a real daemon: answered where one can be addressed, and served on."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from daemons import Daemon, wait_until
from dispatching import NOT_MESSAGES, hello_map

from mambapool.client import Worker
from mambapool.client.lease import Lease
from mambapool.pool import protocol
from mambapool.pool.protocol import (
    MALFORMED,
    OK,
    REFUSED,
    STATUS,
    UNKNOWN_SESSION,
    WRONG_EPOCH,
    WRONG_VERSION,
    pack,
    unpack,
)

#: What no field of a HELLO takes.
NO_VALUES: tuple[Any, ...] = (None, True, float("nan"), 2**64 - 1, "\0", b"\0", [[]], {"a": {}})

SLOTS = 64
MOST_GROWTH_BYTES = 64 * 2**20


class RawPeer:
    """A DEALER socket that sends what no client would."""

    def __init__(self, daemon: Daemon) -> None:
        #: What a HELLO needs: a lock that this process holds.
        self.lease = Lease(daemon.directory)
        self._context = zmq.Context()
        self._dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._dealer.rcvtimeo = 10_000
        self._dealer.connect(daemon.directory.endpoint)
        self._last = 2**40

    def send(self, *frames: bytes) -> None:
        self._dealer.send_multipart(frames)

    def replies(self) -> list[list[Any]]:
        """What has come back for everything sent so far: all that comes before the answer to one more STATUS."""
        self._last += 1
        self.send(pack((STATUS, 0, self._last, 0, 0, 0)))
        found: list[list[Any]] = []
        while True:
            reply = self._dealer.recv()
            fields = unpack(reply, len(reply))
            if fields[0] == self._last:
                assert fields[2] == OK
                return found
            found.append(fields)

    def ask(self, *fields: Any) -> list[Any]:
        self.send(pack(fields))
        (reply,) = self.replies()
        return reply

    def hello_map(self, **changes: Any) -> dict[str, Any]:
        return hello_map(self.lease.name, **changes)

    def close(self) -> None:
        self.lease.close()
        self._dealer.close(linger=0)
        self._context.term()


@pytest.fixture
def peer(daemon: Daemon) -> Iterator[RawPeer]:
    peer = RawPeer(daemon)
    yield peer
    peer.close()


@pytest.fixture
def epoch(daemon: Daemon) -> int:
    epoch: int = daemon.status()["epoch"]
    return epoch


class Neighbour:
    """A normal client that works all the time, and what it saw."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._error: BaseException | None = None
        self.rounds = 0
        self.seconds: list[float] = []

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                self._round()
                self.rounds += 1
        except BaseException as error:
            self._error = error

    def _round(self) -> None:
        allocator = self._worker.allocator
        begin = time.perf_counter()
        slots = allocator.alloc(3)
        self.seconds.append(time.perf_counter() - begin)
        assert slots is not None
        assert len(set(slots.tolist())) == 3
        assert allocator.available_size() == SLOTS - 3
        allocator.alloc_group_begin(5)
        window = [allocator.alloc(1) for _ in range(4)]
        assert None not in window
        allocator.alloc_group_end()
        assert allocator.available_size() == SLOTS - 7
        allocator.clear()
        assert allocator.available_size() == SLOTS

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Works inside; at the end every call was right, and none waited for the hostile peer's sake."""
        self._thread.start()
        try:
            yield
            seen = self.rounds
            wait_until(lambda: self._error or self.rounds > seen + 10, "the neighbour goes on working")
        finally:
            self._stop.set()
            self._thread.join(30)
        if self._error is not None:
            raise self._error
        # Not the largest: one stroke of the scheduler on a loaded machine is no fault of the daemon.
        assert sorted(self.seconds)[int(len(self.seconds) * 0.99) - 1] < 0.2


@pytest.fixture(autouse=True)
def _serves_on(daemon: Daemon) -> Iterator[None]:
    """Whatever a test sends: the same process serves a normal client beside it, and no slot is missing."""
    pid = daemon.allocator_pid
    before = memory_bytes(pid)
    worker = daemon.connect(name="neighbour")
    with Neighbour(worker).working():
        yield
    assert daemon.status()["pid"] == pid
    assert memory_bytes(pid) - before < MOST_GROWTH_BYTES
    drained = [slot.item() for slot in iter(lambda: worker.allocator.alloc(1), None)]
    assert sorted(drained) == list(range(1, SLOTS + 1))


def memory_bytes(pid: int) -> int:
    """What the process has in memory now."""
    match = re.search(r"VmRSS:\s+([0-9]+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def test_what_is_no_message_is_answered(peer: RawPeer) -> None:
    for name, body in NOT_MESSAGES.items():
        peer.send(body)
        replies = peer.replies()
        assert [reply[2] for reply in replies] == [MALFORMED], name
        assert len(replies[0][3]) <= 300


def test_stray_frames_are_answered_once_and_put_nothing_out_of_step(peer: RawPeer) -> None:
    valid = pack((STATUS, 0, 7, 0, 0, 0))
    for count in (2, 3, 50):
        for frame in (valid, b"", b"\xc1" * 1000):
            peer.send(*[frame, valid] * (count // 2), *[frame] * (count % 2))
            (reply,) = peer.replies()
            assert reply[0] == 0
            assert reply[2:] == [MALFORMED, f"a message has one frame, not {count}"]
            assert peer.ask(STATUS, 0, 7, 0, 0, 0)[:3:2] == [7, OK]


def test_a_message_that_is_too_long_is_answered(peer: RawPeer) -> None:
    limit = protocol.max_body_bytes(SLOTS)
    for size in (limit + 1, 2 * limit, 2**22):
        peer.send(bytes(size))
        (reply,) = peer.replies()
        assert reply[2:] == [MALFORMED, f"a message of {size} bytes is too long"]


def test_a_string_of_64_mib_is_not_kept(peer: RawPeer) -> None:
    peer.send(b"\xdb\x04\0\0\0" + bytes(2**26))
    # Whether it is answered or its connection is cut: the daemon serves the next message of the same peer.
    assert all(reply[2] == MALFORMED for reply in peer.replies())


def test_operations_sessions_and_epochs_that_there_are_not_are_told(peer: RawPeer, epoch: int) -> None:
    assert peer.ask(99, 0, 5, epoch, 0, 0)[:3] == [5, epoch, UNKNOWN_SESSION]
    session = peer.ask(protocol.HELLO, 0, 1, 0, 0, 0, peer.hello_map())[3]["session"]
    assert peer.ask(99, session, 5, epoch, 0, 0) == [5, epoch, MALFORMED, "unknown operation 99"]
    for op in protocol.OP_NAMES:
        if op not in (protocol.HELLO, STATUS, protocol.EVICT, protocol.AUDIT):
            assert peer.ask(op, session + 999, 5, epoch, 1, 0, 1, None)[:3] == [5, epoch, UNKNOWN_SESSION]
            assert peer.ask(op, session, 5, epoch + 1, 1, 0, 1, None)[:3] == [5, epoch, WRONG_EPOCH]
    # The neighbour's session exists, but not on this connection.
    assert peer.ask(protocol.CLEAR, session - 1, 0, epoch, 1, 0, None)[:3] == [0, epoch, UNKNOWN_SESSION]
    assert peer.ask(protocol.DETACH, session, 6, epoch, 0, 0)[2] == OK


def test_a_hello_that_is_not_as_it_should_be_is_told_what_is_wrong(peer: RawPeer) -> None:
    reply = peer.ask(protocol.HELLO, 0, 1, 0, 0, 0, peer.hello_map(versions=[999, 999]))
    assert reply[2] == WRONG_VERSION
    assert "999" in reply[3]
    for field in ("versions", "lease", "pool", "name", "pid", "rank", "guarantee"):
        hello = peer.hello_map()
        for value in NO_VALUES:
            reply = peer.ask(protocol.HELLO, 0, 1, 0, 0, 0, {**hello, field: value})
            assert reply[2] == MALFORMED, (field, value)
            assert field in reply[3]
        del hello[field]
        assert peer.ask(protocol.HELLO, 0, 1, 0, 0, 0, hello)[2] == MALFORMED


def test_numbers_of_every_kind_are_no_counts(peer: RawPeer, epoch: int) -> None:
    session = peer.ask(protocol.HELLO, 0, 1, 0, 0, 0, peer.hello_map())[3]["session"]
    for request_id, count in enumerate(
        (float("nan"), float("inf"), 2**64 - 1, -(2**63), 0, True, None, "9"), start=2
    ):
        reply = peer.ask(protocol.ALLOC, session, request_id, epoch, 0, 0, count, None, False)
        assert reply[:3] == [request_id, epoch, MALFORMED]
    assert peer.ask(protocol.DETACH, session, 99, epoch, 0, 0)[2] == OK


def test_10000_random_messages_are_answered_each(peer: RawPeer, epoch: int) -> None:
    """Random bytes, and valid messages with random bytes in them; none of a session that holds anything."""
    source = random.Random(76)
    valid = [
        pack((protocol.ALLOC, 1, 2, epoch, 0, 0, 3, None, True)),
        pack((protocol.OFFER, 1, 2, epoch, 0, 0, bytes(12), 2)),
        pack((protocol.EVICT, 0, 2, 0, 0, 0, 2**40, False)),
        pack((protocol.BEGIN, 1, 2, epoch, 1, 0, 3, bytes(12), True)),
        pack((protocol.FREE, 1, 0, epoch, 1, 0, bytes(400))),
        pack((STATUS, 0, 3, 0, 0, 0)),
    ]
    answered = 0
    for _ in range(50):
        for _ in range(200):
            body = bytearray(
                source.choice(valid) if source.random() < 0.5 else source.randbytes(source.randrange(200))
            )
            for _ in range(source.randrange(4)):
                if body:
                    body[source.randrange(len(body))] = source.randrange(256)
            peer.send(bytes(body))
        replies = peer.replies()
        # Nothing of it is of a session of this connection, so that everything is refused, or a STATUS.
        assert {reply[2] for reply in replies} <= {MALFORMED, UNKNOWN_SESSION, WRONG_EPOCH, REFUSED, OK}
        answered += len(replies)
    assert answered == 10_000


def test_what_is_not_even_zeromq_is_cut_off(daemon: Daemon, peer: RawPeer) -> None:
    source = random.Random(79)
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL" + bytes(16) + b"\0" + bytes(31)
    for data in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 1000,
        greeting[:30],
        greeting,
        greeting + source.randbytes(999),
    ):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(daemon.directory.allocator_socket))
            stranger.sendall(data)
        assert peer.replies() == []


def test_a_peer_that_reads_no_replies_costs_the_others_nothing(daemon: Daemon, peer: RawPeer) -> None:
    deaf = RawPeer(daemon)
    for _ in range(5000):
        deaf.send(b"\xc1")
    assert peer.replies() == []
    deaf.close()
