"""The allocator's table of file descriptors is full: nobody new comes in, everybody else is served."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator

import pytest
from daemons import Daemon, wait_until
from soaking import RawSession

from mambapool.pool import protocol
from mambapool.pool.protocol import OK

#: An unpatched libzmq aborts at the limit; far above it nobody is refused.
LIMIT = 96


@pytest.fixture
def sessions() -> Iterator[list[RawSession]]:
    made: list[RawSession] = []
    yield made
    for session in made:
        session.close()


def test_new_clients_wait_outside_until_somebody_leaves_and_the_others_are_served(
    daemon_factory: Callable[..., Daemon], sessions: list[RawSession]
) -> None:
    daemon = daemon_factory(slots=8)
    allocator = daemon.allocator_pid
    _, hard = resource.prlimit(allocator, resource.RLIMIT_NOFILE)
    resource.prlimit(allocator, resource.RLIMIT_NOFILE, (LIMIT, hard))
    while daemon.directory.allocator_socket.exists():
        assert len(sessions) < LIMIT, "nobody was kept out"
        with contextlib.suppress(FileNotFoundError):
            sessions.append(RawSession(daemon.dir))
            assert sessions[-1].hello()[0] == OK
    outside = RawSession(daemon.dir)
    sessions.append(outside)
    outside.send_hello()
    for session in sessions[:-1]:
        reply = session.ask(protocol.ALLOC, 1, None, False)
        assert reply[0] == OK
        session.post(protocol.FREE, reply[1])
    assert not outside.arrived()
    assert "file descriptors are left: no new connections; raise the limit" in daemon.log
    for session in sessions[: len(sessions) // 2]:
        assert session.ask(protocol.DETACH) == [OK]
        session.close()
    del sessions[: len(sessions) // 2]
    assert outside.receive()[0] == OK
    assert daemon.allocator_pid == allocator
    assert len(os.listdir(f"/proc/{allocator}/fd")) < LIMIT
    wait_until(daemon.directory.allocator_socket.exists, "the door is open again")
