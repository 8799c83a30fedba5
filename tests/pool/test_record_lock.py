"""Record locks between real processes: what leases and the locks of the daemon's processes rest on."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mambapool.pool import record_lock

Python = Callable[..., subprocess.Popen[str]]
Eventually = Callable[[Callable[[], bool]], None]

# Takes the lock, says so, then runs the rest of the program.
TAKES = """
import os, signal, sys
from mambapool.pool import record_lock

fd = os.open(sys.argv[1], os.O_RDWR)
print(record_lock.take(fd), flush=True)
"""


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[int]:
    """A descriptor of a lock file, opened once in this process."""
    path = tmp_path / "lock"
    path.touch()
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


@pytest.fixture
def holder(python: Python, lock: int, tmp_path: Path) -> Callable[[str], subprocess.Popen[str]]:
    """Start a process that takes the lock and then does what it is given."""

    def start(then: str) -> subprocess.Popen[str]:
        process = python(TAKES + then, tmp_path / "lock")
        assert said(process) == "True"
        return process

    return start


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


Holder = Callable[[str], subprocess.Popen[str]]


def test_another_process_has_it_until_it_is_killed(lock: int, holder: Holder, eventually: Eventually) -> None:
    process = holder("signal.pause()")
    assert record_lock.holder(lock) == process.pid
    assert not record_lock.take(lock)
    process.kill()
    eventually(lambda: record_lock.holder(lock) is None)
    assert record_lock.take(lock)


def test_a_dead_one_that_nobody_has_waited_for_does_not_have_it(
    lock: int, holder: Holder, eventually: Eventually
) -> None:
    process = holder("signal.pause()")
    os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: record_lock.holder(lock) is None)
    assert process.returncode is None


def test_a_stopped_process_keeps_it(lock: int, holder: Holder) -> None:
    process = holder("signal.pause()")
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert record_lock.holder(lock) == process.pid
    process.send_signal(signal.SIGCONT)


def test_a_forked_child_does_not_keep_it_for_its_parent(lock: int, holder: Holder, eventually: Eventually) -> None:
    process = holder("child = os.fork()\nif child: print(child, flush=True)\nsignal.pause()")
    child = int(said(process))
    try:
        assert record_lock.holder(lock) == process.pid
        process.kill()
        eventually(lambda: record_lock.holder(lock) is None)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_another_program_does_not_inherit_it(lock: int, holder: Holder, eventually: Eventually) -> None:
    process = holder("os.execv('/bin/sleep', ['sleep', '60'])")
    eventually(lambda: record_lock.holder(lock) is None)
    assert process.poll() is None


def test_closing_any_descriptor_of_the_file_drops_it(lock: int, holder: Holder, eventually: Eventually) -> None:
    """The trap: why a lease is opened once and never by anybody else in its process."""
    process = holder("os.close(os.open(sys.argv[1], os.O_RDONLY))\nprint('closed', flush=True)\nsignal.pause()")
    assert said(process) == "closed"
    assert record_lock.holder(lock) is None


def test_within_one_process_it_does_not_conflict(lock: int) -> None:
    assert record_lock.take(lock)
    assert record_lock.take(lock)
    assert record_lock.holder(lock) is None, "asked by its holder, nobody else has it"


def test_the_file_may_be_removed_and_the_lock_is_there(lock: int, holder: Holder, tmp_path: Path) -> None:
    process = holder("signal.pause()")
    (tmp_path / "lock").unlink()
    assert record_lock.holder(lock) == process.pid


def test_only_a_descriptor_for_writing_can_take_it(lock: int, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "lock", os.O_RDONLY)
    with pytest.raises(OSError):
        record_lock.take(fd)
    os.close(fd)
