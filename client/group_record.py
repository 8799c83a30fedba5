"""What a rank knows that its group holds: the same on every rank that has made the same calls."""

from __future__ import annotations

import numpy as np

from mambapool.client.record import HELD, OFFERED, Record
from mambapool.pool.errors import InvalidSlots, NotHolder


class Undecided(Exception):
    """Raised when some of the slots were on offer: rank 0 has to say, in a call of the group, what became of that."""


class GroupRecord(Record):
    """Only calls change it, never a look at the slot table: at another rank's look that is another one.

    So what is on offer stays marked, accepted or not, until a call of the group says what became of it.
    """

    def count(self) -> int:
        """How many slots the group has, offered ones included, as the slot table is now."""
        offered: list[int] = np.flatnonzero(self._view == OFFERED).tolist() if OFFERED in self.marks else []
        accepted = sum(not self._is_still_ours(slot) for slot in offered)
        return len(self.marks) - self.marks.count(0) - accepted

    def put_in_window(self, slots: list[int]) -> None:
        """These are in the group's window: nobody was given them yet, and an offer of them is long over."""
        self._mark(slots, 0)

    def begin_offer(self, slots: list[int]) -> list[int]:
        """These are on offer from now on; refused whole if the group does not hold them all.

        Returns those that were on offer before, of which nobody has said yet what became of that.
        """
        try:
            self.give_back(slots)
            before = []
        except Undecided:
            before = [slot for slot in slots if self.marks[slot] == OFFERED]
        self._offered_of.update((slot, self._grant_of(slot)) for slot in slots if slot not in before)
        self._mark(slots, OFFERED)
        return before

    def undo_offer(self, slots: list[int], before: list[int]) -> None:
        """The offer of these was refused; those of ``before`` had been on offer before it."""
        self._mark(slots, HELD)
        self._mark(before, OFFERED)

    def check_back(self, slots: list[int]) -> None:
        """Rank 0: refuse unless the offers of these have ended, and they are the group's."""
        table = self._table
        offered = [slot for slot in slots if self.marks[slot] == OFFERED]
        # In this order: who accepts is written as the holder before the offer ends.
        if still := [slot for slot in offered if table.offered_to(slot) and self._is_still_ours(slot)]:
            raise NotHolder(f"slots {_named(still)} are offered to another session", still)
        if gone := [slot for slot in offered if not self._is_still_ours(slot)]:
            raise NotHolder(f"slots {_named(gone)} were offered to another session, which has accepted them", gone)

    def end_offers(self, slots: list[int]) -> None:
        """Rank 0 has said that these are plainly the group's again."""
        self._mark([slot for slot in slots if self.marks[slot] == OFFERED], HELD)

    def is_ours(self, slot: int) -> bool:
        """Whether the slot table says so now."""
        return self._table.holder_of(slot) == self.session

    def _refuse_unless_back(self, slots: list[int]) -> None:
        if faulty := [slot for slot in slots if self.marks[slot] not in (HELD, OFFERED)]:
            try:
                self.refuse(faulty)
            except InvalidSlots as error:
                # What is wrong the table says, at another rank's look maybe something else: of the same slots.
                raise type(error)(str(error), faulty) from None
        raise Undecided()

    def take_back_ended(self) -> None:
        """Not by a look at the table."""

    def _forget_accepted(self) -> None:
        """Neither."""

    def _mark(self, slots: list[int], mark: int) -> None:
        for slot in slots:
            self.marks[slot] = mark


def _named(slots: list[int]) -> str:
    return ", ".join(map(str, slots))
