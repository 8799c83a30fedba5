"""Freed slots of a group on their way out: kept until every rank has passed the free.

Ranks run at different times. When rank 0 frees a slot, another rank may still write to its shard of it: another
engine that got the slot would find its state overwritten. The group itself may have such a slot again at once:
each rank's own order sees to that.
"""

from __future__ import annotations

from collections import deque


class Limbo:
    """Slots in the order of their frees, each batch with the number of the call that freed it. The caller locks."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, list[int]]] = deque()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, call: int, slots: list[int]) -> None:
        """Call number ``call`` freed these."""
        if slots:
            self._batches.append((call, slots))
            self._count += len(slots)

    def take_passed(self, passed: int) -> list[int]:
        """Those that every rank is done with, when all ranks have passed call ``passed``."""
        slots: list[int] = []
        while self._batches and self._batches[0][0] <= passed:
            slots += self._batches.popleft()[1]
        self._count -= len(slots)
        return slots

    def take(self, count: int) -> tuple[list[int], int]:
        """The first ``count`` of them, or as many as there are: for the group itself; and by which call they were
        free, all of them."""
        slots: list[int] = []
        call = 0
        while self._batches and len(slots) < count:
            call, batch = self._batches.popleft()
            wanted = count - len(slots)
            slots += batch[:wanted]
            if len(batch) > wanted:
                self._batches.appendleft((call, batch[wanted:]))
        self._count -= len(slots)
        return slots, call

    def put_back(self, call: int, slots: list[int]) -> None:
        """Slots that were taken and are not needed, to the front: free since ``call`` at the latest."""
        if slots:
            self._batches.appendleft((call, slots))
            self._count += len(slots)

    def slots(self) -> list[int]:
        """All of them."""
        return [slot for _, batch in self._batches for slot in batch]
