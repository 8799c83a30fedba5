"""Clients that behave badly as a whole: they flood, do not read, connect all the time, want everything.

The allocator's memory stays what it was, and whoever behaves is served with exact counts.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from daemons import Daemon, wait_until
from soaking import RawSession

from mambapool.pool import protocol
from mambapool.pool.protocol import NONE, OK, pack

#: Buffers of the sockets and of the log may come to this.
MOST_GROWTH_BYTES = 5_000_000

CONNECTIONS = 1000
#: The allocator keeps the replies of 1,024.
MOST_REQUESTS = 5000
SLOTS = 64


def own_memory(pid: int) -> int:
    """Anonymous memory that a process has now, in bytes: proc_pid_status(5)."""
    with open(f"/proc/{pid}/status") as status:
        (line,) = (line for line in status if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


@pytest.fixture
def good(daemon: Daemon) -> Iterator[RawSession]:
    """A client that is served as before, by the same process, whose memory is what it was."""
    session = RawSession(daemon.dir)
    assert session.hello()[0] == OK
    work(session)
    pid, before = daemon.allocator_pid, own_memory(daemon.allocator_pid)
    yield session
    work(session)
    assert daemon.allocator_pid == pid
    wait_until(lambda: own_memory(pid) - before < MOST_GROWTH_BYTES, "the memory is what it was")
    session.close()


def work(session: RawSession) -> None:
    """Every slot, no more, and back."""
    reply = session.ask(protocol.ALLOC, SLOTS, None, False)
    assert reply[0] == OK
    assert sorted(reply[1]) == list(range(1, SLOTS + 1))
    assert session.ask(protocol.ALLOC, 1, None, False) == [NONE]
    session.post(protocol.FREE, reply[1])
    assert session.ask(protocol.ALLOC, 1, None, False)[0] == OK
    session.post(protocol.CLEAR, None)


def test_a_client_that_never_reads_loses_its_replies_and_nobody_elses(daemon: Daemon, good: RawSession) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as deaf:
        deaf.linger = 0
        deaf.rcvhwm = 1
        deaf.connect(daemon.directory.endpoint)
        for count in range(20_000):
            # Answered with the whole status: megabytes, if they were kept.
            deaf.send(pack((protocol.STATUS, 0, count + 1, 0, 0, 0)))
            if count % 2000 == 0:
                work(good)
        work(good)


def test_a_client_that_connects_a_thousand_times_leaves_nothing(daemon: Daemon, good: RawSession) -> None:
    pid = daemon.allocator_pid
    before = len(os.listdir(f"/proc/{pid}/fd"))
    for count in range(CONNECTIONS):
        for path, kind in (
            (daemon.directory.allocator_socket, socket.SOCK_STREAM),
            (daemon.directory.lease_socket, socket.SOCK_SEQPACKET),
        ):
            with socket.socket(socket.AF_UNIX, kind) as stranger, contextlib.suppress(BlockingIOError):
                stranger.connect(str(path))
                if count % 2:
                    stranger.send(b"x" * 16)
        if count % 200 == 0:
            work(good)
    wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before + 2, "its connections are closed")
    assert os.listdir(daemon.directory.leases) == [good._lease.name.hex()]


def test_sessions_that_come_and_vanish_leave_nothing(daemon: Daemon, good: RawSession) -> None:
    for _ in range(100):
        session = RawSession(daemon.dir)
        assert session.hello()[0] == OK
        session.ask(protocol.ALLOC, 3, None, False)
        session.close()  # without a word
    wait_until(lambda: len(daemon.pool()["holders"]) == 1, "their sessions have ended")
    assert daemon.pool()["free"] == SLOTS


def test_a_greedy_client_gets_what_there_is_and_no_more(daemon: Daemon) -> None:
    """Nobody else can have slots then, but everybody is answered, and the greedy one's end gives all back."""
    greedy, other = RawSession(daemon.dir), RawSession(daemon.dir)
    assert greedy.hello()[0] == other.hello()[0] == OK
    held = []
    while (reply := greedy.ask(protocol.ALLOC, 1, None, False))[0] == OK:
        held.append(reply[1])
    assert sorted(held) == list(range(1, SLOTS + 1))
    for _ in range(2000):
        greedy.send(protocol.ALLOC, SLOTS, None, False)
    started = time.monotonic()
    assert other.ask(protocol.ALLOC, 1, None, False) == [NONE]
    assert time.monotonic() - started < 5
    greedy.close()
    wait_until(lambda: other.ask(protocol.ALLOC, SLOTS, None, False)[0] == OK, "the greedy one's slots are free")
    other.close()


def test_a_client_that_opens_ever_more_requests_is_refused_at_a_limit(daemon: Daemon, good: RawSession) -> None:
    with contextlib.closing(RawSession(daemon.dir)) as hoarder:
        assert hoarder.hello()[0] == OK
        answered: dict[int, int] = {}

        def alloc(number: int) -> None:
            # It never says that a reply has arrived: the allocator has to keep all of them.
            fields = (protocol.ALLOC, hoarder.number, number, hoarder.epoch, 0, 0, SLOTS + 1, None, False)
            hoarder.send_body(pack(fields))
            while hoarder.arrived():
                request_id, _, status, *_ = protocol.unpack(hoarder._socket.recv(), 1000)
                answered[request_id] = status

        def last_is_answered() -> bool:
            alloc(MOST_REQUESTS)  # again, should its reply have found the pipe full
            return MOST_REQUESTS in answered

        for number in range(2, MOST_REQUESTS + 1):
            alloc(number)
        # Answers come in order: then all have come.
        wait_until(last_is_answered, "the last one is answered")
        assert answered[2] == NONE
        assert answered[MOST_REQUESTS] == protocol.MALFORMED
        assert set(answered.values()) == {NONE, protocol.MALFORMED}


@pytest.mark.parametrize("door", ["allocator.sock", "lease.sock"])
def test_a_flood_of_connections_with_few_descriptors_ends_no_process(
    daemon_factory: Callable[..., Daemon], door: str
) -> None:
    """libzmq aborts where it has no descriptor left to accept with: nobody new comes in before that."""
    daemon = daemon_factory(slots=SLOTS)
    pid = daemon.allocator_pid
    session = RawSession(daemon.dir)
    assert session.hello()[0] == OK
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (400, 400))
    with contextlib.ExitStack() as strangers:
        for _ in range(1000):
            kind = socket.SOCK_SEQPACKET if door == "lease.sock" else socket.SOCK_STREAM
            stranger = strangers.enter_context(socket.socket(socket.AF_UNIX, kind))
            stranger.setblocking(False)
            # Full, or moved out of the way: that is how it is refused.
            with contextlib.suppress(BlockingIOError, FileNotFoundError, ConnectionError):
                stranger.connect(str(daemon.dir / door))
        for _ in range(20):
            work(session)
            time.sleep(0.02)
        assert daemon.allocator_pid == pid
    wait_until(daemon.directory.allocator_socket.exists, "the door is open again")
    with contextlib.closing(RawSession(daemon.dir)) as late:
        assert late.hello()[0] == OK
    session.close()
