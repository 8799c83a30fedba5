"""When a process that is used by others has nothing left to do."""

from __future__ import annotations

import os

from mambapool.pool import record_lock
from mambapool.pool.regular_files import open_regular
from mambapool.pool.runtime_dir import RuntimeDir


class Idle:
    """Nobody uses it any more: somebody did, and for ``after_s`` seconds nobody has. None: it never says so."""

    def __init__(self, after_s: float | None) -> None:
        self.after_s = after_s
        self._last_used: float | None = None

    def use(self, now: float) -> None:
        """It is used at this moment; ``now`` in seconds."""
        self._last_used = now

    def is_over(self, now: float) -> bool:
        return self.after_s is not None and self._last_used is not None and now - self._last_used >= self.after_s


def has_allocator(directory: RuntimeDir) -> bool:
    """Whether an allocator runs there, or crashed: then the next one needs the same keepers.

    One that ends on purpose removes ``ready``; a killed one leaves it. Each starts by taking its lock.
    """
    if directory.ready.exists():
        return True
    try:
        lock = open_regular(directory.allocator_lock, os.O_RDWR)
    except OSError:
        return False
    try:
        return record_lock.holder(lock) is not None
    finally:
        os.close(lock)
