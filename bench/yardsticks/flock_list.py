"""A free list in shared memory under ``flock``: no server at all. It has no holders, no reclaim and no checks."""

from __future__ import annotations

import fcntl
import mmap
import tempfile
from collections.abc import Callable

import numpy as np


def call(size: int) -> Callable[[], object]:
    """Allocates one slot and gives back the one before, under the lock."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  kept by the call
    file.truncate(8 * (size + 2))
    mapped = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
    np.frombuffer(mapped, np.int64)[2:] = np.arange(1, size + 1)
    mapped[1] = size  # how many are free; word 0 is where the head is
    held = 0

    def swap() -> None:
        nonlocal held
        fcntl.flock(file, fcntl.LOCK_EX)
        head, free = mapped[0], mapped[1]
        if held:
            mapped[2 + (head + free) % size] = held
            free += 1
        held = mapped[2 + head]
        mapped[0] = (head + 1) % size
        mapped[1] = free - 1
        fcntl.flock(file, fcntl.LOCK_UN)

    return swap
