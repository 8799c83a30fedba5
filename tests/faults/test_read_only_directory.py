"""A runtime directory in which nothing can be written: refused with the reason, and who is attached goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemons import Daemon, mambapool
from fresh_pool import granted

from mambapool.client import connect
from mambapool.pool.errors import RuntimeDirError


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr}")


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Root may write whatever the mode says, but not to a read-only mount; what is open stays as it was opened."""
    if os.geteuid():
        pytest.skip("mounting needs root")
    mount("--bind", str(directory), str(directory))
    try:
        mount("-o", "remount,ro,bind", str(directory))
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.mark.parametrize("command", ["serve", "allocator", "keeper --state c=float32:1x2"])
def test_who_would_serve_there_is_told_what_to_do(runtime_dir: Path, command: str) -> None:
    runtime_dir.mkdir(mode=0o700)
    with read_only(runtime_dir):
        ended = mambapool(*command.split(), "--dir", str(runtime_dir), "--slots", "4")
    assert ended.returncode == 1
    assert ended.stderr == f"mambapool: {runtime_dir} cannot be written; name another directory with --dir\n"
    assert not list(runtime_dir.iterdir())


def test_a_new_client_is_told_why_and_an_old_one_goes_on(daemon_factory: Callable[..., Daemon]) -> None:
    daemon = daemon_factory(slots=8)
    worker = daemon.connect()
    with read_only(daemon.dir):
        with pytest.raises(RuntimeDirError, match="cannot be written"):
            connect(daemon.dir)
        slots = granted(worker.allocator.alloc(8))
        worker.allocator.free(slots)
        assert worker.allocator.free_slots.numel() == 8
        assert daemon.pool()["free"] == 8
    assert granted(daemon.connect().allocator.alloc(1)).numel() == 1
