"""Who waits for slots: first come, first served, so that no large request starves behind small ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mambapool.pool.errors import AllocatorUnavailable

if TYPE_CHECKING:
    from mambapool.service.sessions import Session


@dataclass(frozen=True, slots=True)
class Waiter:
    """One request that is answered when ``count`` slots are there. ``op`` is ALLOC, or HELLO for a guarantee."""

    session: Session
    request_id: int
    op: int
    count: int
    version: int = 0  # of a HELLO


class WaitQueue:
    """The waiters of one pool. While there are any, nobody overtakes them."""

    def __init__(self, max_waiters: int) -> None:
        self._max_waiters = max_waiters
        self._queue: deque[Waiter] = deque()
        #: Slots that all of them wait for.
        self.slots = 0

    def __bool__(self) -> bool:
        return bool(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def head(self) -> Waiter:
        return self._queue[0]

    def add(self, waiter: Waiter) -> None:
        """To the end; :class:`AllocatorUnavailable` when the queue is full."""
        if len(self._queue) >= self._max_waiters:
            raise AllocatorUnavailable(
                f"{self._max_waiters} requests wait for slots already: try again later, or raise --max-waiters"
            )
        self._queue.append(waiter)
        self.slots += waiter.count

    def pop(self) -> Waiter:
        waiter = self._queue.popleft()
        self.slots -= waiter.count
        return waiter

    def find(self, session: Session, request_id: int) -> Waiter | None:
        for waiter in self._queue:
            if waiter.session is session and waiter.request_id == request_id:
                return waiter
        return None

    def remove(self, session: Session, request_id: int | None = None) -> bool:
        """Forget one request of a session, or all of them; whether there was any."""
        kept = [w for w in self._queue if w.session is not session or request_id not in (None, w.request_id)]
        if len(kept) == len(self._queue):
            return False
        self._queue = deque(kept)
        self.slots = sum(waiter.count for waiter in kept)
        return True
