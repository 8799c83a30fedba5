"""What this client knows that it holds: the check on its side, found at once and without a message."""

from __future__ import annotations

import numpy as np

from mambapool.pool.errors import DoubleFree, NotHolder
from mambapool.pool.slot_table import SlotTableReader

#: Up to here a loop is faster than numpy's fixed cost per call.
SMALL_BATCH = 32


HELD = 1
OFFERED = 2
LEAVING = 3
OFFERING = 4


class Record:
    """One byte per slot: 1 while the caller has it, 2 while it is on offer to another session, else 0.

    4 while an offer of it is under way, of which nobody knows yet whether it was made. On a GPU 3 is a slot that is to
    be offered when the GPU is done with it, and there are more bytes: one for each cell that can stand for a slot.

    The caller of its methods locks.

    ``marks[slot] = 1`` is one atomic store under the GIL, which is why the path of alloc(1) needs no lock.
    """

    def __init__(self, table: SlotTableReader, session: int, cells: int = 0) -> None:
        self.marks = bytearray(table.layout.slots + 1 + cells)
        self._view = np.frombuffer(self.marks, np.uint8)
        self._table = table
        #: Whose slots these are: a session's, or those of a group's rank 0.
        self.session = session
        #: By which grant the caller had what it offered, see :meth:`_grant_of`.
        self._offered_of: dict[int, tuple[int, int]] = {}

    def hold(self, slots: list[int]) -> None:
        """These were handed to the caller."""
        if len(slots) <= SMALL_BATCH:
            for slot in slots:
                self.marks[slot] = 1
        else:
            self._view[slots] = 1

    def give_back(self, slots: list[int]) -> None:
        """These, distinct and in range, come back; refused whole if the caller does not hold them all."""
        self._change(slots, 0)

    def offering(self, slots: list[int]) -> None:
        """An offer of these is under way; refused whole if the caller does not hold them all."""
        self._change(slots, OFFERING)
        self.note_offer(slots)

    def note_offer(self, slots: list[int]) -> None:
        """These, which the caller has, are about to be offered."""
        self._offered_of.update((slot, self._grant_of(slot)) for slot in slots)
        for slot in slots:
            self.marks[slot] = OFFERING

    def offered(self, slots: list[int]) -> None:
        """What was under way is for the slot table to tell from now on."""
        for slot in slots:
            if self.marks[slot] == OFFERING:
                self.marks[slot] = OFFERED

    def count(self) -> int:
        """How many slots the caller has, offered ones included."""
        self._forget_accepted()
        return len(self.marks) - self.marks.count(0)

    def clear(self, *, offers_end: bool = True) -> int:
        """Nothing is held any more, but for what is on offer unless ``offers_end``; returns how much was."""
        count = self.count()
        kept = () if offers_end else (OFFERED, OFFERING)
        self._view[~np.isin(self._view, kept)] = 0
        return count

    def held(self) -> list[int]:
        """What the caller has and may free, ascending."""
        slots: list[int] = np.flatnonzero(self._view == HELD).tolist()
        return slots

    def _change(self, slots: list[int], mark: int) -> None:
        marks = self.marks
        if len(slots) <= SMALL_BATCH:
            for slot in slots:
                if marks[slot] != HELD:
                    self._refuse_unless_back(slots)
                    break
            for slot in slots:
                marks[slot] = mark
        else:
            if (self._view[slots] != HELD).any():
                self._refuse_unless_back(slots)
            self._view[slots] = mark

    def _refuse_unless_back(self, slots: list[int]) -> None:
        self.take_back_ended()
        if any(self.marks[slot] != HELD for slot in slots):
            self.refuse(slots)

    def take_back_ended(self) -> None:
        """An offer ends when its receiver does: then its slots are plainly ours again, the table says."""
        self._forget_accepted()
        if OFFERED in self.marks:
            for slot in np.flatnonzero(self._view == OFFERED).tolist():
                # In this order: who accepts is written as the holder before the offer ends.
                if not self._table.offered_to(slot) and self._is_still_ours(slot):
                    self.marks[slot] = HELD

    def end_offer(self, slots: list[int]) -> bool:
        """An offer of these was refused: those that are still the caller's are plainly so; whether there are any."""
        self.offered(slots)
        self._forget_accepted()
        still = [slot for slot in slots if self.marks[slot] == OFFERED]
        for slot in still:
            self.marks[slot] = HELD
        return bool(still)

    def _forget_accepted(self) -> None:
        """What was on offer and has another holder now was accepted: nobody tells the giver."""
        if OFFERED in self.marks:
            for slot in np.flatnonzero(self._view == OFFERED).tolist():
                if not self._is_still_ours(slot):
                    self.marks[slot] = 0

    def _is_still_ours(self, slot: int) -> bool:
        """Whether the caller has it since before it offered it.

        What was accepted may be this session's again, in a window, in limbo, or by a call under way: then the caller
        was not given it yet.
        """
        return self._table.holder_of(slot) == self.session and self._grant_of(slot) == self._offered_of[slot]

    def _grant_of(self, slot: int) -> tuple[int, int]:
        """How often the slot had been handed out, and which request has brought it to its holder."""
        return self._table.generation_of(slot), self._table.request_of(slot)

    def refuse(self, slots: list[int]) -> None:
        """Raise what is wrong with freeing these: who has them is in the slot table."""
        faulty = [slot for slot in slots if self.marks[slot] != HELD]
        if offered := [slot for slot in faulty if self.marks[slot] in (OFFERED, LEAVING, OFFERING)]:
            raise NotHolder(f"slots {_named(offered)} are offered to another session", offered)
        holders = {slot: self._table.holder_of(slot) for slot in faulty}
        ours = (0, self.session)  # what we freed may still be on its way to the table
        if free := [slot for slot in faulty if holders[slot] in ours]:
            raise DoubleFree(f"slots {_named(free)} are already free", free)
        sessions = sorted({holders[slot] for slot in faulty})
        raise NotHolder(
            f"slots {_named(faulty)} are held by session {_named(sessions)}, not by this one ({self.session})",
            faulty,
        )


def _named(items: list[int], most: int = 16) -> str:
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"
