"""Whose turn it is to ask the allocator for something."""

from __future__ import annotations

import threading
import time

from mambapool.client.transport import Transport
from mambapool.pool.errors import AllocatorUnavailable


class Turn:
    """One call at a time. Who waits for longer than the timeout is told so, as if by a silent allocator."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        #: Whose turn it is has it.
        self.lock = threading.Lock()
        #: When the call that has its turn is out of time, if it had to wait for the turn: that counts.
        self.deadline: float | None = None

    def take(self) -> None:
        # Without a timeout first: that is ten times faster where nobody has it.
        if self.lock.acquire(blocking=False):
            self.deadline = None
            return
        timeout = self._transport.timeout
        deadline = time.monotonic() + timeout
        if not self.lock.acquire(timeout=timeout):
            raise AllocatorUnavailable(
                f"the allocator of {self._transport.directory.path} is not available: another thread's call "
                f"waited for it for {timeout:g} s"
            )
        self.deadline = deadline

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_error: object) -> None:
        self.lock.release()
