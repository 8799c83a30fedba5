"""``mambapool serve`` from its start to its end, and the ends that nobody asked for."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Command, children_of, is_running, running
from daemons import SMALL_STATE, Daemon, wait_until

from mambapool.pool.errors import MambaPoolError
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.pool.slot_table import MAGIC
from mambapool.pool.version import VERSION
from mambapool.service import serve as serve_module
from mambapool.service.serve import MOST_SHORT_LIVES, SHORT_LIFE_S, Crashes

DaemonFactory = Callable[..., Daemon]

TWO_SHARDS = ("--slots", "8", "--state", SMALL_STATE[0], "--tp-size", "2")

#: What is left when a daemon of two shards has ended: locks, and the folder of the clients' leases.
LOCKS = {"serve.lock", "allocator.lock", "keeper-default-0.lock", "keeper-default-1.lock", "leases"}
SOCKETS = {"allocator.sock", "lease.sock", "keeper-default-0.sock", "keeper-default-1.sock"}

#: SIGTERM has to be obeyed within a second; the rest is for a machine that does something else too.
END_S = 1.0 + 3.0


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("number", "umask", "clients"), [(signal.SIGTERM, 0o022, 1), (signal.SIGINT, 0, 0)])
def test_serve_says_that_it_is_ready_and_leaves_nothing_but_locks_at_its_end(
    daemon_factory: DaemonFactory, runtime_dir: Path, number: int, umask: int, clients: int
) -> None:
    before = os.umask(umask)
    daemon = daemon_factory(slots=8, states=SMALL_STATE, options=("--tp-size", "2"))
    os.umask(before)
    ready = json.loads((runtime_dir / "ready").read_text())
    children = children_of(daemon.process.pid)

    assert daemon.ready_line == (
        f"mambapool ready: {runtime_dir}, pid {ready['pid']}, pool default: 8 slots of 328 bytes on 2 shards\n"
    )
    assert ready == {
        "pid": ready["pid"],
        "epoch": daemon.status()["epoch"],
        "endpoint": f"ipc://{runtime_dir}/allocator.sock",
        "version": VERSION,
        "pools": ["default"],
    }
    assert ready["pid"] in children
    assert len(children) == 3, "an allocator and two keepers"
    assert mode(runtime_dir) == 0o700
    assert names(runtime_dir) == {*LOCKS, *SOCKETS, "default.table", "ready"}
    for name in SOCKETS:
        assert (runtime_dir / name).is_socket()
        assert mode(runtime_dir / name) & 0o077 == 0, "somebody else could connect"

    mapped = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    assert not [name for name in ("numpy", "torch", "zmq") if name in mapped], "the parent stays light"

    for _ in range(clients):
        daemon.connect(pool="made", create_slots=3)  # a client that is still there does not hold the end up
    began = time.monotonic()
    daemon.process.send_signal(number)
    assert daemon.process.wait(10) == 0
    assert time.monotonic() - began < END_S
    assert names(runtime_dir) == LOCKS
    assert not any(is_running(pid) for pid in children)
    assert "Traceback" not in daemon.log


def test_an_allocator_that_does_not_listen_to_a_signal_is_ended_all_the_same(
    daemon_factory: DaemonFactory, runtime_dir: Path
) -> None:
    daemon = daemon_factory(slots=8, states=SMALL_STATE[:1], options=("--tp-size", "2"))
    os.kill(daemon.allocator_pid, signal.SIGSTOP)
    began = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - began < 1.0 + END_S
    assert names(runtime_dir) == LOCKS


def test_a_signal_before_it_is_ready_ends_serve(runtime_dir: Path) -> None:
    with Command("serve", "--dir", runtime_dir, *TWO_SHARDS) as command:
        wait_until((runtime_dir / "serve.lock").exists, "serve has its lock")
        assert command.end() == 0
        assert "Traceback" not in command.stderr
    assert names(runtime_dir) <= LOCKS


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.heavy)])
def test_kill_9_of_serve_takes_its_children_along_and_a_new_one_starts_at_once(
    rounds: int, runtime_dir: Path
) -> None:
    orphans: list[int] = []
    took_s = []
    for _ in range(rounds):
        began = time.monotonic()
        with Command("serve", "--dir", runtime_dir, *TWO_SHARDS) as command:
            command.ready_line()
            took_s.append(time.monotonic() - began)
            assert not any(is_running(pid) for pid in orphans), "two daemons in one directory"
            orphans = children_of(command.pid)
            assert len(orphans) == 3
            command.end(signal.SIGKILL)
    # Two seconds for the orphans to see it, one to start.
    assert max(took_s) < 3.0 + END_S, took_s
    killed = time.monotonic()
    wait_until(lambda: not any(is_running(pid) for pid in orphans), "the orphans end")
    assert time.monotonic() - killed < 2.0 + 1.0
    assert names(runtime_dir) == {*LOCKS, "default.table"}, "the table is the next serve's to remove"


def test_what_killed_daemons_left_is_replaced_and_then_removed(
    daemon_factory: DaemonFactory, runtime_dir: Path
) -> None:
    options = ("--tp-size", "2", "--pool", "old")
    daemon = daemon_factory(slots=8, states=SMALL_STATE[:1], options=options)
    allocator = daemon.allocator_pid
    children = children_of(daemon.process.pid)
    for pid in (daemon.process.pid, *children):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, children)), "all are dead")
    daemon.process.wait()
    left = {"ready", "allocator.sock", "lease.sock", "old.table", "keeper-old-0.sock", "keeper-old-1.sock"}
    assert left <= names(runtime_dir)

    again = daemon_factory(slots=8, states=SMALL_STATE[:1], options=options)
    assert again.allocator_pid != allocator
    assert again.stop() == 0
    assert not left & names(runtime_dir)


def test_tables_of_pools_that_are_not_served_any_more_are_removed_and_other_files_are_not(
    runtime_dir: Path,
) -> None:
    runtime_dir.mkdir(mode=0o700)
    (runtime_dir / "gone.table").write_bytes(MAGIC.to_bytes(8, "little") + bytes(4096))
    (runtime_dir / "results.table").write_text("somebody's measurements\n")
    (runtime_dir / "empty.table").touch()
    (runtime_dir / "folder.table").mkdir()
    with running("serve", "--dir", runtime_dir, "--slots", "8") as command:
        assert command.end() == 0
    others = {"results.table", "empty.table", "folder.table"}
    assert names(runtime_dir) == {"serve.lock", "allocator.lock", "leases", *others}
    assert MAGIC.to_bytes(8, "little") == serve_module._TABLE_MAGIC


def test_serve_ends_with_its_children_when_a_keeper_dies(runtime_dir: Path) -> None:
    with running("serve", "--dir", runtime_dir, *TWO_SHARDS) as command:
        children = children_of(command.pid)
        pid = int((runtime_dir / "keeper-default-1.lock").read_text())
        assert pid in children
        os.kill(pid, signal.SIGKILL)
        assert command.wait() == 1
        said = "mambapool: the keeper of pool default rank 1 was killed by SIGKILL: its states are gone\n"
        assert command.stderr.endswith(said)
        assert "Traceback" not in command.stderr
    assert not any(is_running(pid) for pid in children)
    assert names(runtime_dir) == LOCKS


def test_an_allocator_that_was_killed_is_brought_back_and_its_keepers_stay(
    daemon_factory: DaemonFactory, runtime_dir: Path
) -> None:
    daemon = daemon_factory(slots=8, states=SMALL_STATE[:1], options=("--tp-size", "2"))
    children = children_of(daemon.process.pid)
    killed, epoch = daemon.allocator_pid, daemon.status()["epoch"]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: ready_pid(runtime_dir) not in (None, killed), "another one is ready")
    assert daemon.status()["epoch"] == epoch + 1
    keepers = set(children) - {killed}
    assert set(children_of(daemon.process.pid)) == {*keepers, daemon.allocator_pid}
    assert "the allocator was killed by SIGKILL; it is brought back in 0.0 s" in daemon.log
    assert daemon.process.poll() is None
    assert daemon.stop() == 0
    assert names(runtime_dir) == LOCKS


def ready_pid(directory: Path) -> int | None:
    """The allocator that says it is ready, if any does."""
    ready = RuntimeDir(directory).read_ready()
    return ready["pid"] if ready else None


def test_an_allocator_that_never_lives_for_long_is_given_up(runtime_dir: Path) -> None:
    """Something is in its way, which was not there when the first one started."""
    with running("serve", "--dir", runtime_dir, *TWO_SHARDS) as command:
        children = children_of(command.pid)
        (runtime_dir / "lease.sock").unlink()
        (runtime_dir / "lease.sock").mkdir()
        os.kill(int((runtime_dir / "allocator.lock").read_text()), signal.SIGKILL)
        assert command.wait(60) == 1
        last = command.stderr.splitlines()[-1]
        assert "the allocator did not come up: " in last
        assert f"{runtime_dir}/lease.sock is in the way and is no socket" in last
        assert f"{MOST_SHORT_LIVES} times in a row" in last
        assert "Traceback" not in command.stderr
    assert not any(is_running(pid) for pid in children)
    assert names(runtime_dir) == {*LOCKS, "lease.sock"}


def test_crashes_in_a_row_are_waited_for_ever_longer_and_then_given_up() -> None:
    crashes = Crashes()
    waits = [crashes.another(0.9, "exited with status 1") for _ in range(MOST_SHORT_LIVES - 1)]
    assert waits == [0.0, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    expected = r"the allocator exited with status 1, 8 times in a row within 1 s of its start: .*see its log above"
    with pytest.raises(MambaPoolError, match=expected):
        crashes.another(0.9, "exited with status 1")


def test_an_allocator_that_lived_for_a_while_is_brought_back_at_once_however_often() -> None:
    crashes = Crashes()
    for _ in range(3 * MOST_SHORT_LIVES):
        assert crashes.another(0.5, "was killed by SIGKILL") == 0.0
        assert crashes.another(SHORT_LIFE_S, "was killed by SIGKILL") == 0.0


def test_serve_without_slots_has_no_pool_until_a_client_makes_one(daemon_factory: DaemonFactory) -> None:
    daemon = daemon_factory(slots=None)
    assert daemon.ready_line.endswith(", no pool yet\n")
    assert daemon.status()["pools"] == []
    worker = daemon.connect(pool="mine", create_slots=3)
    assert daemon.pool("mine")["free"] == 3
    worker.close()
    assert daemon.status()["pools"] == []


def test_keepers_of_others_are_not_served(daemon_factory: DaemonFactory, runtime_dir: Path) -> None:
    """They may be those of a serve that was killed a moment ago, and end in the next one."""
    keeper = ("keeper", "--dir", runtime_dir, "--pool", "old", "--slots", "3", "--state", "c=float32:1x2")
    with running(*keeper):
        daemon = daemon_factory(slots=8)
        assert [pool["name"] for pool in daemon.status()["pools"]] == ["default"]
