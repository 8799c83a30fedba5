"""One directory, one daemon: who else wants it is refused, and what lies in the way stays as it is."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from commands import Command, running
from daemons import Daemon, mambapool, wait_until

from mambapool.client.operators import ask_status
from mambapool.pool.runtime_dir import RuntimeDir

DaemonFactory = Callable[..., Daemon]

STATE = ("--state", "c=float32:1x2")


def test_whoever_comes_second_is_refused_with_the_first_ones_pid(daemon_factory: DaemonFactory) -> None:
    daemon = daemon_factory(slots=8, states=("c=float32:1x2",))
    worker = daemon.connect()
    slots = worker.allocator.alloc(3)
    place = ("--dir", str(daemon.dir))
    keeper_pid = int((daemon.dir / "keeper-default-0.lock").read_text())
    for command, role, pid in (
        (("serve", *place, "--slots", "99", *STATE), "mambapool serve", daemon.process.pid),
        (("allocator", *place), "allocator", daemon.allocator_pid),
        (("keeper", *place, "--slots", "8", *STATE), "keeper of default rank 0", keeper_pid),
    ):
        done = mambapool(*command)
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr == (
            f"mambapool: another {role} (pid {pid}) has {daemon.dir}: stop it first, or name another --dir\n"
        )
    worker.states["c"][:, slots] = 1
    one = worker.allocator.alloc(1)
    assert one is not None
    assert one.tolist() == [4], "the first one goes on undisturbed"
    assert daemon.process.poll() is None
    assert daemon.connect(rank=0).states["c"].sum() == 6


def test_an_allocator_that_stands_alone_is_not_disturbed_by_a_serve(runtime_dir: Path) -> None:
    place = ("--dir", runtime_dir, "--slots", "8")
    with running("allocator", *place) as allocator:
        before = {path.name: path.stat().st_ino for path in runtime_dir.iterdir()}
        with Command("serve", *place) as serve:
            assert serve.wait() == 3
            assert f"(pid {allocator.pid})" in serve.stderr
        after = {path.name: path.stat().st_ino for path in runtime_dir.iterdir()}
        assert after == {**before, "serve.lock": after["serve.lock"]}
        assert ask_status(RuntimeDir(runtime_dir), 5.0)["pid"] == allocator.pid
        assert allocator.end() == 0


def test_of_two_that_start_at_once_exactly_one_serves(runtime_dir: Path) -> None:
    for number in range(6):
        # In a directory that both of them have to make, and in one that has served before.
        directory = runtime_dir.with_name(f"run-{number // 2}")
        command = ("serve", "--dir", directory, "--slots", "4")
        with Command(*command) as first, Command(*command) as second:
            both = {first, second}
            (loser,) = wait_until(partial(ended, both), "one of two ends", 30)
            (winner,) = both - {loser}
            assert loser.process.returncode == 3
            assert f"another mambapool serve (pid {winner.pid})" in loser.stderr
            winner.ready_line()
            assert ask_status(RuntimeDir(directory), 5.0)["pools"][0]["free"] == 4
            assert winner.end() == 0


def ended(commands: set[Command]) -> list[Command]:
    return [command for command in commands if command.process.poll() is not None]


@pytest.fixture
def socket_path(runtime_dir: Path) -> Iterator[Path]:
    """Where the allocator's socket belongs; no serve has left anything but locks at the end."""
    runtime_dir.mkdir(mode=0o700)
    path = runtime_dir / "allocator.sock"
    yield path
    assert {other.name for other in runtime_dir.iterdir()} - {path.name} <= {
        "serve.lock",
        "allocator.lock",
        "leases",
    }


def refused(path: Path) -> str:
    """Start a serve that cannot; its one line."""
    before = os.lstat(path)
    done = mambapool("serve", "--dir", str(path.parent), "--slots", "4")
    after = os.lstat(path)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert str(path) in done.stderr
    assert (before.st_ino, before.st_mode, before.st_mtime_ns) == (after.st_ino, after.st_mode, after.st_mtime_ns)
    assert done.returncode == (3 if stat.S_ISSOCK(after.st_mode) else 1)
    return done.stderr


def test_a_file_in_the_place_of_the_socket_is_refused_and_kept(socket_path: Path) -> None:
    socket_path.write_text("precious")
    assert "is no socket" in refused(socket_path)
    assert socket_path.read_text() == "precious"


def test_a_folder_in_the_place_of_the_socket_is_refused_and_kept(socket_path: Path) -> None:
    socket_path.mkdir()
    assert "is no socket" in refused(socket_path)


def test_a_dangling_link_in_the_place_of_the_socket_is_refused_and_kept(socket_path: Path) -> None:
    target = socket_path.with_name("elsewhere")
    socket_path.symlink_to(target)
    assert "is no socket" in refused(socket_path)
    assert not target.exists()


def test_a_socket_that_somebody_else_listens_to_is_refused_and_kept(socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(socket_path))
        listener.listen()
        assert "is listened to by another process" in refused(socket_path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(socket_path))
    assert socket_path.is_socket(), "not removed when the refused serve ended either"
