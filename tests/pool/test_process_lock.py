from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mambapool.pool.errors import AllocatorAlreadyRunning, RuntimeDirError
from mambapool.pool.process_lock import ProcessLock

Process = subprocess.Popen[str]
Python = Callable[..., Process]

#: Takes the lock in argv[1], says so, and keeps it until stdin ends. Locks do not conflict within one process.
HOLD = """
import sys
from pathlib import Path
from mambapool.pool.process_lock import ProcessLock
lock = ProcessLock(Path(sys.argv[1]), "allocator")
print("held", flush=True)
sys.stdin.read()
"""

#: The same, and then forks a child that keeps the descriptor.
HOLD_AND_FORK = HOLD.replace(
    "print",
    """
import os
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print""",
)


#: Waits for the lock for longer than any test; says so each time that it finds it taken.
WAIT = """
import sys, time
from pathlib import Path
from mambapool.pool.process_lock import ProcessLock
sleep = time.sleep
time.sleep = lambda seconds: (print("waits", flush=True), sleep(seconds))
lock = ProcessLock(Path(sys.argv[1]), "allocator", wait_s=60)
print("held", flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "allocator.lock"


@pytest.fixture
def hold(python: Python, path: Path) -> Callable[[str], Process]:
    """Start a process that has the lock when this returns."""

    def start(program: str = HOLD) -> Process:
        process = python(program, path)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    return start


def is_locked(path: Path) -> bool:
    """Whether another process has it; does not touch a lock of this one, which has none."""
    with path.open("r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_second_process_is_refused_and_told_who_has_the_lock(path: Path, hold: Callable[[], Process]) -> None:
    holder = hold()
    with pytest.raises(AllocatorAlreadyRunning) as caught:
        ProcessLock(path, "allocator")
    assert str(caught.value) == (
        f"another allocator (pid {holder.pid}) has {path.parent}: stop it first, or name another --dir"
    )
    assert path.read_text() == f"{holder.pid}\n"
    assert is_locked(path), "the refusal took the holder's lock away"


def test_a_refusal_leaves_no_descriptor_open(path: Path, hold: Callable[[], Process]) -> None:
    hold()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(AllocatorAlreadyRunning):
        ProcessLock(path, "allocator")
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_lock_of_a_killed_process_is_free(path: Path, hold: Callable[[], Process]) -> None:
    holder = hold()
    holder.kill()
    holder.wait()
    # The file is still there, with the pid of the dead: it means nothing.
    assert path.read_text() == f"{holder.pid}\n"
    ProcessLock(path, "allocator")
    assert path.read_text() == f"{os.getpid()}\n"


def test_a_child_does_not_inherit_the_lock(path: Path, hold: Callable[[str], Process]) -> None:
    holder = hold(HOLD_AND_FORK)
    assert is_locked(path)
    holder.kill()
    holder.wait()
    # Its child lives, and has the descriptor: it waits for the end of the same stdin.
    assert not is_locked(path)


def test_a_longer_pid_of_an_earlier_holder_does_not_shine_through(path: Path) -> None:
    path.write_text("4194303999\n")
    ProcessLock(path, "allocator")
    assert path.read_text() == f"{os.getpid()}\n"


def test_a_lock_file_is_made_for_its_owner_alone(path: Path) -> None:
    ProcessLock(path, "allocator")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_who_waits_gets_the_lock_once_its_holder_ends(
    path: Path, hold: Callable[[], Process], python: Python
) -> None:
    holder = hold()
    waiter = python(WAIT, path)
    assert waiter.stdout is not None
    assert waiter.stdout.readline() == "waits\n"
    holder.kill()
    holder.wait()
    assert waiter.communicate(timeout=20)[0].splitlines()[-1] == "held"
    assert path.read_text() == f"{waiter.pid}\n"


def test_who_waits_is_refused_when_its_time_is_up(path: Path, hold: Callable[[], Process]) -> None:
    holder = hold()
    begin = time.monotonic()
    with pytest.raises(AllocatorAlreadyRunning, match=f"pid {holder.pid}"):
        ProcessLock(path, "allocator", wait_s=0.2)
    assert time.monotonic() - begin >= 0.2


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeDirError, match=r"cannot open the lock file .*No such file"):
        ProcessLock(tmp_path / "missing" / "a.lock", "allocator")


def test_a_link_in_place_of_the_file_is_refused(path: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    path.symlink_to(precious)
    with pytest.raises(RuntimeDirError, match="cannot open the lock file"):
        ProcessLock(path, "allocator")
    assert precious.read_text() == "content"
