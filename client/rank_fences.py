"""How far the GPU of a rank is, told to its group: what leaves the group waits for every rank's.

Each call after which something may leave the group gets a fence, behind all that this rank had queued before it. When
that has passed, and with it those of all calls before, the group page says so
(:data:`mambapool.pool.group_page.R_FENCE`). Rank 0 gives a slot back when the page says so of every rank.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mambapool.client.background import background
from mambapool.client.fences import Event, Fences
from mambapool.pool.errors import CudaError

if TYPE_CHECKING:
    from mambapool.client.group import Group


@dataclass(slots=True)
class _Noted:
    """A call, its fence, and the caller's events that have to be over, too."""

    call: int
    fence: int
    after: tuple[Event, ...]


class RankFences:
    """Of one rank. ``kinds``: the calls that are noted without being asked for, by their kind.

    :meth:`note` is for the thread that makes the rank's calls, :meth:`publish` for any. Neither waits.
    """

    def __init__(self, group: Group, fences: Fences, kinds: frozenset[int]) -> None:
        self.kinds = kinds
        self._group = group
        self._fences = fences
        self._noted: deque[_Noted] = deque()
        self._after: tuple[Event, ...] = ()
        self._publishing = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """Whether the page does not say all yet."""
        return bool(self._noted) and self._fences.failed is None

    @property
    def failed(self) -> CudaError | None:
        """Why this rank's fences will never pass: what the group has freed stays its own."""
        return self._fences.failed

    def check(self, after: Any) -> tuple[Event, ...]:
        """Before a free: its events; raises when they are none, or when this driver cannot fence it."""
        events = tuple(Event(event) for event in after) if after is not None else ()
        self._fences.check()
        return events

    def after(self, events: tuple[Event, ...]) -> None:
        """The next call that is noted is behind these, too."""
        self._after += events

    def note(self, call: int, after: tuple[Event, ...] = ()) -> None:
        """This rank has made call number ``call``: fence what was queued before it."""
        events, self._after = self._after + after, ()
        self._noted.append(_Noted(call, self._fences.issue(), events))
        background().wake()

    def retry(self) -> None:
        """Record what could not be recorded while a graph was captured."""
        self._fences.retry()

    def publish(self) -> None:
        """Say in the page up to which call everything is over."""
        if not self._publishing.acquire(blocking=False):
            return
        try:
            self._fences.poll()
            while self._noted and self._is_over(self._noted[0]):
                self._group.fenced(self._noted[0].call)
                self._noted.popleft()
        finally:
            self._publishing.release()

    def events(self) -> list[Event]:
        """The callers' events that are not over yet."""
        return [event for noted in list(self._noted) for event in noted.after]

    def is_event_over(self, event: Event) -> bool:
        return self._fences.is_event_over(event.handle)

    def _is_over(self, noted: _Noted) -> bool:
        if noted.fence > self._fences.passed:
            return False
        noted.after = tuple(event for event in noted.after if not self.is_event_over(event))
        return not noted.after
