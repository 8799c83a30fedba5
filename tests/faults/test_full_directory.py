"""A runtime directory on a tmpfs that is full: what does not fit is refused with the reason, the rest goes on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemons import Daemon, mambapool
from fresh_pool import granted

from mambapool.client import connect
from mambapool.pool.errors import AllocatorUnavailable

SIZE_BYTES = 2 << 20


@pytest.fixture
def tiny_tmpfs(runtime_dir: Path) -> Iterator[Path]:
    """The runtime directory is the root of a file system of its own."""
    if os.geteuid():
        pytest.skip("mounting a tmpfs needs root")
    runtime_dir.mkdir(mode=0o700)
    options = f"size={SIZE_BYTES},mode=700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(runtime_dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr}")
    yield runtime_dir
    subprocess.run(["umount", "-l", str(runtime_dir)], check=True)


def fill(directory: Path) -> None:
    """Take whatever room is left there."""
    with (directory / "filler").open("wb") as file:
        left = os.statvfs(directory)
        os.posix_fallocate(file.fileno(), 0, left.f_bavail * left.f_frsize)


def test_a_new_pool_is_refused_with_the_reason_and_clients_go_on(
    tiny_tmpfs: Path, daemon_factory: Callable[..., Daemon]
) -> None:
    daemon = daemon_factory(tiny_tmpfs, slots=64)
    worker = daemon.connect()
    fill(tiny_tmpfs)
    with pytest.raises(
        AllocatorUnavailable, match=r"cannot make the slot table .*No space left on device; free space there"
    ):
        connect(tiny_tmpfs, pool="another", create_slots=10_000)
    assert [pool["name"] for pool in daemon.status()["pools"]] == ["default"]
    slots = granted(worker.allocator.alloc(64))
    worker.allocator.free(slots)
    assert worker.allocator.free_slots.numel() == 64
    another = daemon.connect()  # a lease is an empty file
    assert granted(another.allocator.alloc(1)).numel() == 1
    (tiny_tmpfs / "filler").unlink()
    daemon.connect(pool="another", create_slots=1000)


def test_a_daemon_that_does_not_fit_is_refused_with_the_reason(tiny_tmpfs: Path) -> None:
    fill(tiny_tmpfs)
    ended = mambapool("serve", "--dir", str(tiny_tmpfs), "--slots", "64")
    assert ended.returncode == 1
    assert "No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not ended.stdout
