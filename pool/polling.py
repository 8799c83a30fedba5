"""Waiting for file descriptors. Not ``select()``, which knows none above 1023."""

from __future__ import annotations

import select


def readable(*fds: int, timeout: float | None = None) -> list[int]:
    """Those of ``fds`` that can be read, or whose other end is closed, after at most ``timeout`` seconds."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _event in poll.poll(None if timeout is None else max(timeout, 0) * 1000)]
