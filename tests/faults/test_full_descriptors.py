"""The allocator's table of file descriptors is full: nobody new comes in, everybody else is served."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator

import pytest
from daemons import Daemon, wait_until
from soaking import RawSession

from mambapool.pool import protocol
from mambapool.pool.protocol import OK

#: An unpatched libzmq aborts at the limit; far above it nobody is refused.
LIMIT = 160


@pytest.fixture
def sessions() -> Iterator[list[RawSession]]:
    made: list[RawSession] = []
    yield made
    for session in made:
        session.close()


def attach_until_one_is_kept_out(daemon: Daemon, sessions: list[RawSession]) -> RawSession:
    """It is among ``sessions``, has said HELLO, and has no answer."""
    while len(sessions) < LIMIT:
        sessions.append(RawSession(daemon.dir))
        sessions[-1].send_hello()
        greeting = sessions[-1].receive(0.3 if daemon.directory.allocator_socket.exists() else 0.0)
        if greeting is None and not daemon.directory.allocator_socket.exists():
            return sessions[-1]
        assert greeting is not None, "neither let in nor kept out"
        assert greeting[0] == OK
    raise AssertionError("nobody was kept out")


def test_new_clients_wait_outside_until_somebody_leaves_and_the_others_are_served(
    daemon_factory: Callable[..., Daemon], sessions: list[RawSession]
) -> None:
    daemon = daemon_factory(slots=8)
    allocator = daemon.allocator_pid
    _, hard = resource.prlimit(allocator, resource.RLIMIT_NOFILE)
    resource.prlimit(allocator, resource.RLIMIT_NOFILE, (LIMIT, hard))
    outside = attach_until_one_is_kept_out(daemon, sessions)
    assert len(sessions) > 3, "an unlikely place for the limit: this shows little"
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
