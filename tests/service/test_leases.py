"""The allocator's side of a lease: a file that is looked at once opened, whatever becomes of its name."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemons import wait_until

from mambapool.pool.errors import ProtocolError
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.service.leases import ReleasedLock, WatchedLock, left_over, open_lease, remove_left_over

Holder = Callable[[bytes], subprocess.Popen[str]]

HOLDS = """
import os, signal, sys
from mambapool.pool import record_lock

fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
print(record_lock.take(fd), flush=True)
signal.pause()
"""


@pytest.fixture
def directory() -> Iterator[RuntimeDir]:
    with tempfile.TemporaryDirectory(prefix="mambapool-") as path:
        yield RuntimeDir.for_server(path)


@pytest.fixture
def hold(directory: RuntimeDir) -> Iterator[Holder]:
    """Start a process that holds the lease of that name."""
    started: list[subprocess.Popen[str]] = []

    def start(name: bytes) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDS, str(directory.lease(name))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def name() -> bytes:
    return secrets.token_bytes(16)


def test_a_held_lease_is_held_until_its_process_dies(directory: RuntimeDir, hold: Holder, name: bytes) -> None:
    process = hold(name)
    lease = open_lease(directory, name)
    assert (lease.name, lease.is_held()) == (name, True)
    process.send_signal(signal.SIGSTOP)
    assert lease.is_held()
    process.kill()
    wait_until(lambda: not lease.is_held(), "the lock is released")
    lease.close()


def test_a_lease_whose_name_is_gone_or_anothers_is_looked_at_all_the_same(
    directory: RuntimeDir, hold: Holder, name: bytes
) -> None:
    process = hold(name)
    lease = open_lease(directory, name)
    path = directory.lease(name)
    path.unlink()
    assert lease.is_held()
    path.touch()
    assert lease.is_held()
    process.kill()
    wait_until(lambda: not lease.is_held(), "the lock is released")
    lease.close()


def test_what_nobody_holds_is_refused_and_leaves_no_descriptor(directory: RuntimeDir, name: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProtocolError, match=f"no lease {name.hex()}"):
        open_lease(directory, name)
    directory.lease(name).touch()
    with pytest.raises(ProtocolError, match=f"nobody holds the lease {name.hex()}"):
        open_lease(directory, name)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("kind", ["directory", "fifo", "link to a held one"])
def test_what_is_no_file_of_its_own_is_refused_without_waiting(
    directory: RuntimeDir, hold: Holder, name: bytes, kind: str
) -> None:
    path, other = directory.lease(name), secrets.token_bytes(16)
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        hold(other)
        path.symlink_to(directory.lease(other))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProtocolError, match=f"no lease {name.hex()}"):
        open_lease(directory, name)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_dead_ones_file_is_removed_a_living_ones_is_left(
    directory: RuntimeDir, hold: Holder, name: bytes
) -> None:
    hold(name)
    path = directory.lease(name)
    open_lease(directory, name).close()
    assert path.exists()
    lease = open_lease(directory, name)
    lease.remove()
    assert not path.exists()
    other: Path = directory.lease(b"o" * 16)
    hold(b"o" * 16)
    lease = WatchedLock(b"o" * 16, other)
    other.unlink()
    lease.remove()  # somebody was faster


def test_a_lock_that_was_released_before_anybody_looked_is_not_held() -> None:
    lock = ReleasedLock(b"n" * 16)
    assert not lock.is_held()
    lock.close()
    lock.remove()


def test_leases_that_nobody_holds_at_two_looks_are_removed(
    directory: RuntimeDir, hold: Holder, name: bytes
) -> None:
    held, dead, new = name, b"d" * 16, b"n" * 16
    hold(held)
    for lease in (dead, new):
        directory.lease(lease).touch()
    (directory.leases / "a note of somebody").touch()
    found = left_over(directory)
    assert set(found) == {dead, new}
    hold(new)  # its process was about to take its lock
    remove_left_over(directory, found)
    names = {directory.lease(held).name, directory.lease(new).name, "a note of somebody"}
    assert {path.name for path in directory.leases.iterdir()} == names
    assert open_lease(directory, held).is_held()
