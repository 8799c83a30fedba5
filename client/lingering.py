"""A session that was closed while its work on the GPU was not over: it stays until that is."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from mambapool.client.background import background
from mambapool.client.fences import Event, Fences
from mambapool.client.transport import Transport

_log = logging.getLogger("mambapool.client")

#: The allocator's goodbye is waited for so long by the background thread.
_DETACH_S = 0.2

# Strong: nobody else knows them any more.
_lingering: set[Lingering] = set()


class Closing(Protocol):
    """The allocator of a session on a GPU, a group's rank or not."""

    def events(self) -> list[Event]:
        """The callers' events that have to be over before the session may end."""

    def is_over(self, event: Event) -> bool: ...


class Lingering:
    """Leaves the session when all that its process had queued has finished.

    Until then its lease is held, so that nobody gets its slots. If the process ends before, they come free after
    the quarantine, as those of any other process that dies.
    """

    def __init__(self, transport: Transport, allocator: Closing, fences: Fences) -> None:
        self._transport = transport
        self._fences = fences
        self._events = allocator.events()
        self._is_over = allocator.is_over
        self._fence: int | None = fences.issue()

    @property
    def is_busy(self) -> bool:
        return self._fence is not None and self._fences.failed is None

    def is_over(self, deadline: float) -> bool:
        """Wait until the deadline; whether the GPU is done with this session."""
        if self._fence is None or not self._fences.wait(self._fence, deadline):
            return False
        while self._left():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        return True

    def start(self) -> None:
        """Leave it to the background thread."""
        _log.info(
            "session %d is closed, but its work on the GPU goes on: its slots are kept", self._transport.number
        )
        _lingering.add(self)
        background().add(self)

    def tick(self) -> None:
        if self._fence is None:
            return
        self._fences.poll()
        if self._fences.passed >= self._fence and not self._left():
            self._fence = None
            background().remove(self)
            background().remove(self._transport)
            _lingering.discard(self)
            self._transport.detach(_DETACH_S)

    def _left(self) -> bool:
        self._events = [event for event in self._events if not self._is_over(event)]
        return bool(self._events)
