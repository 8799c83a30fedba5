"""Leases: what proves that a client lives, and that it has died, however it is forked, nested or cut off."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from commands import is_running
from daemons import SMALL_STATE, Daemon, wait_until
from fresh_pool import FreshPool, FreshPoolFactory, drain, ids
from leased_clients import RECLAIM_S, RawClient, RemoteClient, all_free, knows, log_lines, values
from processes import Child, Children, paused

from mambapool.client import Worker
from mambapool.pool import protocol, record_lock
from mambapool.pool.errors import AllocatorUnavailable

DaemonFactory = Callable[..., Daemon]


@pytest.fixture
def pool(new_pool: FreshPoolFactory) -> FreshPool:
    return new_pool(16)


def leases_of(pool: FreshPool) -> set[Path]:
    return set(pool.daemon.directory.leases.iterdir())


def lease_of(worker: Worker) -> Path:
    transport = worker._transport
    return transport.directory.lease(transport.connection.lease.name)


def lock_holder(lease: Path, children: Children) -> int:
    """The process that holds a lease's lock, as another process sees it: none has it twice open."""
    seen = children.run(
        """
        import os, sys
        from mambapool.pool import record_lock
        print(record_lock.holder(os.open(sys.argv[1], os.O_RDWR)))
        """,
        lease,
    )
    return int(seen[0])


def test_a_session_has_a_lock_file_of_its_own_with_a_random_name(pool: FreshPool) -> None:
    before = leases_of(pool)
    with pool.connect(), pool.connect():
        first, second = sorted(leases_of(pool) - before)
        assert {len(bytes.fromhex(lease.name)) for lease in (first, second)} == {16}
        assert {lease.stat().st_mode & 0o777 for lease in (first, second)} == {0o600}
        assert first.name[:8] != second.name[:8], "a name that starts as another one does can be guessed"
    assert leases_of(pool) == before


def test_the_lock_is_the_clients_process_as_the_kernel_tells(pool: FreshPool, children: Children) -> None:
    before = leases_of(pool)
    remote = RemoteClient(children, pool)
    assert knows(pool, remote)
    (lease,) = leases_of(pool) - before
    fd = os.open(lease, os.O_RDWR)
    assert record_lock.holder(fd) == remote.pid
    remote.kill()
    wait_until(lambda: not knows(pool, remote), "its death is noticed", timeout=RECLAIM_S)
    assert record_lock.holder(fd) is None
    os.close(fd)
    assert not lease.exists(), "the allocator removes the file of a dead client"


def test_close_of_one_session_leaves_another_one_of_the_same_process_its_lock(
    pool: FreshPool, children: Children
) -> None:
    first, second = pool.connect(name="engine"), pool.connect(name="engine")
    assert (ids(first.allocator.alloc(4)), ids(second.allocator.alloc(4))) == ([1, 2, 3, 4], [5, 6, 7, 8])
    first.close()
    wait_until(lambda: pool.available == 12, "the closed session's slots are free")
    assert lock_holder(lease_of(second), children) == os.getpid()
    assert knows(pool, second)
    assert pool.held_by(second) == {5, 6, 7, 8}
    second.allocator.free(torch.tensor([5, 6, 7, 8]))
    assert sorted(drain(second.allocator)) == list(range(1, 17))


FORKS = {
    "os.fork, whose child closes its copies": "os.fork()",
    "fork(2), whose child keeps its copies": "__import__('ctypes').CDLL(None).fork()",
}
AFTERWARDS = {"lives on": "signal.pause()", "runs another program": "os.execv('/bin/sleep', ['sleep', '60'])"}


@pytest.mark.parametrize("fork", FORKS)
@pytest.mark.parametrize("then", AFTERWARDS)
def test_a_killed_parents_slots_come_back_although_its_child_lives(
    pool: FreshPool, children: Children, fork: str, then: str
) -> None:
    parent = RemoteClient(children, pool)
    assert parent.ask("allocator.alloc(3)") == [1, 2, 3]
    parent.run(f"pid = {FORKS[fork]}\nif pid == 0:\n    {AFTERWARDS[then]}\nprint(pid, flush=True)")
    child = parent.answer()
    try:
        assert pool.available == 13
        assert parent.ask("allocator.alloc(1)") == [4], "the parent goes on beside its child"
        parent.kill()
        all_free(pool)
        assert is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)


NOT_WAITED_FOR = """
    import os, signal, sys
    from mambapool.client import connect

    if os.fork() == 0:
        worker = connect(sys.argv[1], pool=sys.argv[2])
        worker.allocator.alloc(3)
        print(os.getpid(), flush=True)
        signal.pause()
    sys.stdin.readline()
"""


def test_a_dead_process_that_nobody_has_waited_for_is_dead(pool: FreshPool, children: Children) -> None:
    parent = children.start(NOT_WAITED_FOR, pool.daemon.dir, pool.name)
    pid = int(parent.hear())
    assert pool.available == 13
    os.kill(pid, signal.SIGKILL)
    all_free(pool)
    wait_until(lambda: not is_running(pid), "it has ended")
    assert Path(f"/proc/{pid}").exists(), "nobody has waited for it"
    parent.say_no_more()


def test_a_lease_file_that_somebody_removed_is_a_lease_all_the_same(pool: FreshPool, children: Children) -> None:
    before = leases_of(pool)
    remote = RemoteClient(children, pool)
    assert remote.ask("allocator.alloc(3)") == [1, 2, 3]
    for lease in leases_of(pool) - before:
        lease.unlink()
    assert remote.ask("allocator.alloc(1)") == [4]
    assert pool.held_by(remote.session) == {1, 2, 3, 4}
    remote.kill()
    all_free(pool)
    # And one that is closed in order.
    with pool.connect() as worker:
        lease_of(worker).unlink()
        worker.allocator.alloc(2)
    all_free(pool)


def test_clients_go_on_when_the_whole_directory_is_removed(
    daemon_factory: DaemonFactory, children: Children
) -> None:
    daemon = daemon_factory(slots=8, states=SMALL_STATE)
    first, second = daemon.connect(), daemon.connect(timeout=0.5)
    dying = children.start(HOLDS_TWO, daemon.dir, "default")
    assert dying.hear() == "[1, 2]"
    shutil.rmtree(daemon.dir)
    slot = first.allocator.alloc(1)
    first.states["temporal"][:, slot] = 7
    assert values(second.states["temporal"][:, slot]) == {7}
    assert ids(second.allocator.alloc(1)) == [4]
    second.allocator.free(torch.tensor([4]))
    os.kill(dying.pid, signal.SIGKILL)
    wait_until(lambda: second.allocator.available_size() == 7, "the death is noticed", timeout=RECLAIM_S)
    with pytest.raises(AllocatorUnavailable, match=str(daemon.dir)):
        daemon.connect(timeout=0.2)
    for worker in (first, second):
        worker.close()
    assert daemon.stop() == 0


HOLDS_TWO = """
    import signal, sys
    from mambapool.client import connect

    worker = connect(sys.argv[1], pool=sys.argv[2], name="holds two")
    print(worker.allocator.alloc(2).tolist(), flush=True)
    signal.pause()
"""


def test_who_does_not_hold_a_lease_is_not_attached(pool: FreshPool, children: Children) -> None:
    unlocked = pool.daemon.directory.lease(secrets.token_bytes(16))
    unlocked.touch()
    folder = pool.daemon.directory.lease(secrets.token_bytes(16))
    folder.mkdir()
    names = [secrets.token_bytes(16), bytes.fromhex(unlocked.name), bytes.fromhex(folder.name)]
    with RawClient(pool.daemon.directory) as raw:
        for name in names:
            reply = raw.hello(pool.name, lease=name)
            assert reply[2] == protocol.MALFORMED
            assert name.hex() in reply[3]
        assert len(pool.status()["holders"]) == 1
        # The lock is taken by this process: for the allocator somebody else's, as it has to be.
        assert raw.hello(pool.name)[2] == protocol.OK
    unlocked.unlink()
    folder.rmdir()
    wait_until(lambda: len(pool.status()["holders"]) == 1, "the raw session ends with its lease")


@contextlib.contextmanager
def lease_connections(pool: FreshPool, count: int) -> Iterator[list[socket.socket]]:
    """So many connections to the watcher."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            opened.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
            # A blocking one: another connect fails at once while the watcher's backlog is full.
            opened[-1].connect(str(pool.daemon.directory.lease_socket))
        yield opened


def test_what_strangers_say_to_the_watcher_changes_nothing(pool: FreshPool, children: Children) -> None:
    worker = pool.connect()
    slots = ids(worker.allocator.alloc(3))
    lease = bytes.fromhex(lease_of(worker).name)
    said = [b"x", b"\0" * 16, secrets.token_bytes(16), b"y" * 60_000, lease, lease[:15], lease + b"z"]
    with lease_connections(pool, len(said) + 1) as strangers:
        for stranger, words in zip(strangers, said, strict=False):
            stranger.send(words)
            stranger.send(lease)
    # Their ends are hints at a living one's death; the lock tells otherwise. One that is real is seen meanwhile.
    remote = RemoteClient(children, pool)
    assert remote.ask("allocator.alloc(2)") == [4, 5]
    remote.kill()
    wait_until(lambda: pool.available == 13, "a death is noticed among them", timeout=RECLAIM_S)
    assert pool.held_by(worker) == set(slots)
    assert worker.allocator.alloc(1) is not None


def test_a_thousand_connections_keep_no_client_out_and_leave_no_descriptor(
    pool: FreshPool, children: Children
) -> None:
    descriptors = Path(f"/proc/{pool.daemon.allocator_pid}/fd")
    before = len(list(descriptors.iterdir()))
    remote = RemoteClient(children, pool)
    assert remote.ask("allocator.alloc(2)") == [1, 2]
    with lease_connections(pool, 1000):
        with pool.connect() as worker:
            assert ids(worker.allocator.alloc(1)) == [3]
        remote.kill()
        all_free(pool)
    wait_until(lambda: len(list(descriptors.iterdir())) <= before + 5, "their descriptors are closed")


IN_A_NAMESPACE = """
    import ctypes, os, signal, sys
    from mambapool.client import connect

    CLONE_NEWPID = 0x20000000
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID):
        print(os.strerror(ctypes.get_errno()), flush=True)
        sys.exit()
    pid = os.fork()
    if pid == 0:
        worker = connect(sys.argv[1], pool=sys.argv[2], name="engine-0")
        print(os.getpid(), worker.session, worker.allocator.alloc(3).tolist(), flush=True)
        signal.pause()
    print(pid, flush=True)
    os.waitpid(pid, 0)
"""


def in_a_namespace(pool: FreshPool, children: Children) -> tuple[Child, int, int]:
    """A client that is process 1 of a PID namespace of its own: its starter, its pid here, its session."""
    starter = children.start(IN_A_NAMESPACE, pool.daemon.dir, pool.name)
    pid = starter.hear()
    if not pid.isdigit():
        pytest.skip(f"no PID namespace here: {pid}")
    own_pid, session, *_ = starter.hear().split()
    assert own_pid == "1"
    return starter, int(pid), int(session)


def test_of_two_clients_with_one_name_and_one_pid_in_two_namespaces_the_killed_one_is_reclaimed(
    pool: FreshPool, children: Children
) -> None:
    (first, first_pid, session), (second, second_pid, other) = (in_a_namespace(pool, children) for _ in range(2))
    assert [h["pid"] for h in pool.status()["holders"]][1:] == [1, 1]
    os.kill(first_pid, signal.SIGKILL)
    wait_until(lambda: pool.available == 13, "the killed one's slots are free", timeout=RECLAIM_S)
    assert pool.held_by(other) == {4, 5, 6}
    assert first.wait() == 0
    (line,) = log_lines(pool.daemon, f"session {session} (engine-0, pid 1) is dead")
    assert line.endswith("(its process ended): 3 slots freed: 1-3") or "its connection closed" in line
    os.kill(second_pid, signal.SIGKILL)
    all_free(pool)
    assert second.wait() == 0


def test_two_hundred_sessions_of_one_name_in_a_row_leave_nothing_behind(pool: FreshPool) -> None:
    descriptors = Path(f"/proc/{pool.daemon.allocator_pid}/fd")
    before, leases = len(list(descriptors.iterdir())), leases_of(pool)
    for _ in range(200):
        with pool.connect(name="engine-0") as worker:
            slot = worker.allocator.alloc(1)
            assert slot is not None
            worker.allocator.free(slot)
        pool.workers.remove(worker)
    assert len(pool.status()["holders"]) == 1
    assert leases_of(pool) == leases
    wait_until(lambda: len(list(descriptors.iterdir())) <= before + 5, "no descriptor is left")
    assert sorted(drain(pool.owner.allocator)) == list(range(1, 17))


def test_a_client_is_attached_and_its_death_noticed_although_nobody_accepted_its_connection_at_first(
    pool: FreshPool, children: Children
) -> None:
    with contextlib.ExitStack() as stack:
        with paused(pool.daemon):
            before = leases_of(pool)
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting.setblocking(False)
                try:
                    waiting.connect(str(pool.daemon.directory.lease_socket))
                except BlockingIOError:
                    break  # as many wait as there may
            remote = RemoteClient(children, pool)
            wait_until(lambda: leases_of(pool) - before, "the client has made its lease")
        assert remote.ask("allocator.alloc(2)") == [1, 2]
        remote.kill()
        all_free(pool, within=3 * RECLAIM_S)
