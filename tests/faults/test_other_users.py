"""Who is not the daemon's own user: kept out by modes, and without them by what the kernel says of a peer."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable

import pytest
from daemons import SMALL_STATE, Daemon
from processes import Children

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

NOBODY = 65534

#: Becomes another user and tries everything that a client can; what it gets, a line each.
STRANGER = f"""
    import os, socket, sys
    import zmq
    from mambapool.client import connect, errors
    from mambapool.client.operators import ask_status, evict
    from mambapool.pool import protocol
    from mambapool.pool.handover import receive_block
    from mambapool.pool.runtime_dir import RuntimeDir

    place = RuntimeDir.for_client(sys.argv[1])
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})

    def say_hello():
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger, dealer.rcvtimeo = 0, 1000
            dealer.connect(place.endpoint)
            hello = {{"versions": [1, 1], "lease": bytes(16), "pool": "default", "name": "x", "pid": 1, "rank": 0}}
            dealer.send(protocol.pack((protocol.HELLO, 0, 1, 0, 0, 0, {{**hello, "guarantee": 0}})))
            try:
                reply = dealer.recv()
            except zmq.Again:
                raise errors.AllocatorUnavailable("did not answer") from None
            raise protocol.error_from(protocol.unpack(reply, len(reply))[2:])

    def watch():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as lease:
            lease.settimeout(10)
            lease.connect(str(place.lease_socket))
            assert lease.recv(1) == b""
            raise ConnectionError("closed")

    for attempt in (
        lambda: connect(place.path, timeout=0.5),
        lambda: ask_status(place, 1.0),
        lambda: evict(place, 1.0, 1, force=True),
        say_hello,
        watch,
        lambda: receive_block(place.keeper_socket("default", 0), timeout=5),
        lambda: (place.path / "default.table").open("rb"),
        lambda: (place.leases / "x").open("wb"),
    ):
        try:
            print("DONE", attempt())
        except (errors.MambaPoolError, OSError) as error:
            print(type(error).__name__, error)
"""


@pytest.fixture
def daemon(daemon_factory: Callable[..., Daemon]) -> Daemon:
    daemon = daemon_factory(slots=4, states=SMALL_STATE)
    os.chmod(daemon.dir.parent, 0o755)
    return daemon


def test_all_that_a_daemon_makes_is_its_users_alone(daemon: Daemon) -> None:
    daemon.connect()
    assert stat.S_IMODE(daemon.dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((daemon.dir / "leases").stat().st_mode) == 0o700
    sockets = [path for path in daemon.dir.iterdir() if path.is_socket()]
    assert {path.name for path in sockets} == {"allocator.sock", "lease.sock", "keeper-default-0.sock"}
    for path in sockets:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    # What others might read, had the directory another mode, nobody but the owner may write.
    for path in daemon.dir.rglob("*"):
        assert path.stat().st_mode & 0o022 == 0, path


def test_another_user_does_not_get_in(daemon: Daemon, children: Children) -> None:
    said = children.run(STRANGER, daemon.dir)
    assert len(said) == 8
    assert not [line for line in said if line.startswith("DONE")], said
    assert "answer" in said[1] + said[3]


def test_another_user_who_gets_at_the_sockets_is_told_whose_daemon_it_is(
    daemon: Daemon, children: Children
) -> None:
    """As after a chmod -R, or in a directory that was shared on purpose."""
    holder = daemon.connect()
    for path in (daemon.dir, daemon.dir / "leases"):
        path.chmod(0o755)
    for path in daemon.dir.iterdir():
        if path.is_socket():
            path.chmod(0o777)
    attach, status, evicted, hello, watched, memory, _table, lease = children.run(STRANGER, daemon.dir)
    refusal = f"this daemon serves uid 0, not uid {NOBODY}"
    assert "belongs to uid 0, this process is uid 65534" in attach
    assert refusal in status
    assert refusal in evicted
    assert refusal in hello
    assert watched == "ConnectionError closed"
    assert f"refused: the keeper runs as uid 0, this process is uid {NOBODY}" in memory
    assert "Permission denied" in lease
    assert [entry["session"] for entry in daemon.pool()["holders"]] == [holder.session]
