"""What this client knows that it holds: the check on its side, found at once and without a message."""

from __future__ import annotations

import numpy as np

from mambapool.pool.errors import DoubleFree, NotHolder
from mambapool.pool.slot_table import SlotTableReader

#: Up to here a loop is faster than numpy's fixed cost per call.
SMALL_BATCH = 32


class Record:
    """One byte per slot: 1 while it was handed to the caller and not freed. The caller of its methods locks.

    ``marks[slot] = 1`` is one atomic store under the GIL, which is why the path of alloc(1) needs no lock.
    """

    def __init__(self, table: SlotTableReader, session: int) -> None:
        self.marks = bytearray(table.layout.slots + 1)
        self._view = np.frombuffer(self.marks, np.uint8)
        self._table = table
        self._session = session

    def hold(self, slots: list[int]) -> None:
        """These were handed to the caller."""
        if len(slots) <= SMALL_BATCH:
            for slot in slots:
                self.marks[slot] = 1
        else:
            self._view[slots] = 1

    def give_back(self, slots: list[int]) -> None:
        """These, distinct and in range, come back; refused whole if the caller does not hold them all."""
        marks = self.marks
        if len(slots) <= SMALL_BATCH:
            held = all(marks[slot] for slot in slots)
            if held:
                for slot in slots:
                    marks[slot] = 0
        else:
            held = bool(self._view[slots].all())
            if held:
                self._view[slots] = 0
        if not held:
            self.refuse(slots)

    def clear(self) -> int:
        """Nothing is held any more; returns how much was."""
        count = int(np.count_nonzero(self._view))
        self._view[:] = 0
        return count

    def refuse(self, slots: list[int]) -> None:
        """Raise what is wrong with freeing these: who has them is in the slot table."""
        faulty = [slot for slot in slots if not self.marks[slot]]
        holders = {slot: self._table.holder_of(slot) for slot in faulty}
        ours = (0, self._session)  # what we freed may still be on its way to the table
        if free := [slot for slot in faulty if holders[slot] in ours]:
            raise DoubleFree(f"slots {_named(free)} are already free", free)
        sessions = sorted({holders[slot] for slot in faulty})
        raise NotHolder(
            f"slots {_named(faulty)} are held by session {_named(sessions)}, not by this one ({self._session})",
            faulty,
        )


def _named(items: list[int], most: int = 16) -> str:
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"
