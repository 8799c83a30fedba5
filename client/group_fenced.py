"""The ranks of a group with a guarantee on GPUs: ids that only the device knows, and the same list on every rank."""

from __future__ import annotations

import time
from typing import Any

import torch

from mambapool.client.fenced import Fenced
from mambapool.client.fenced_guaranteed import FencedGuaranteed
from mambapool.client.fences import Event
from mambapool.client.group_calls import FREE_ONE, GroupCalls, free_word
from mambapool.client.group_guaranteed import GroupGuaranteedAllocator
from mambapool.client.group_record import Undecided
from mambapool.pool.errors import GroupBroken
from mambapool.pool.group_calls import FREE, UNKNOWN, call_word

_LOOK_S = 0.0005


class GroupFencedGuaranteed(GroupGuaranteedAllocator, FencedGuaranteed):
    """:class:`FencedGuaranteed` on one rank of a group.

    An id that only the device knows comes to the ranks at different times, and their lists have to stay the same.
    So nothing on the list depends on when that is: one that turns out to be wrong ends this rank's part in the group,
    and while the group has slots that came by a transfer, ids are read, which waits for the current stream.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        #: Slots that came by a transfer; some may have been offered to others since.
        self._foreign: set[int] = set()

    @property
    def is_busy(self) -> bool:
        return super().is_busy or super(GroupCalls, self).is_busy or bool(self._group_limbo)

    def free(self, free_index: torch.Tensor, after: Any = None) -> None:
        """As :meth:`Fenced.free`, on every rank."""
        Fenced.free(self, free_index, after)

    def clear(self) -> None:
        """Free everything that this group holds, but for what is on offer."""
        self._catch_up()  # those are calls, too
        super().clear()

    def hold(self, slots: list[int]) -> torch.Tensor:
        """These became the group's by a transfer."""
        self._foreign.update(slot for slot in slots if slot not in self._guaranteed)
        return super().hold(slots)

    def begin_offer(self, slots: list[int]) -> list[int]:
        """As :meth:`GroupCalls.begin_offer`; they stand for themselves from now on."""
        with self._lock:
            self._resolve()
            if self._ids is not None:
                for slot in slots:
                    self._ids.plain(self._ids.place_of(slot))
        return super().begin_offer(slots)

    def tick(self) -> None:
        """For the background thread."""
        Fenced.tick(self)
        super().tick()

    def _free_places(self, places: list[int], given: list[int], events: tuple[Event, ...]) -> None:
        if max(given) > self._pool_slots():
            word = call_word(FREE, len(given), UNKNOWN)
        else:
            word = FREE_ONE | given[0] if len(given) == 1 else free_word(given)
        with self._group.lock:
            try:
                with self._lock:
                    places = self._given_back(places)
            except Undecided:
                # What is on offer stands for itself.
                self._ask_whether_back(word, [place for place in places if place <= self._pool_slots()])
                with self._lock:
                    places = self._given_back(places)
            else:
                # Not under the lock of the record: it may wait for a rank, and the background thread must not.
                self._group.begin(word)
            with self._lock:
                self._take_back_after(places, events)

    def _free_copied(self, flat: torch.Tensor, events: tuple[Event, ...]) -> bool:
        if self._foreign:
            return False
        assert self._ids is not None
        deadline = time.monotonic() + self._group.timeout
        with self._group.lock:
            self._group.begin(call_word(FREE, flat.numel(), UNKNOWN))
            while True:
                with self._lock:
                    places = self._ids.copy(flat)
                    if places is not None:
                        self._take_back_after(places, events)
                        return True
                # More ids under way than there are cells. Reading them instead, this rank's list would differ.
                if time.monotonic() >= deadline:
                    raise self._out_of_step(f"its GPU has finished nothing for {self._group.timeout:g} s")
                self._fences.poll()
                time.sleep(_LOOK_S)

    def _put_in_limbo(self, places: list[int], events: tuple[Event, ...]) -> None:
        if not places:
            return
        slots = self._plain(places)
        self._foreign.difference_update(slots)
        number = self._group.position
        assert self._group.fences is not None
        self._group.fences.note(number, events)
        if not self._group.rank:
            self._group_limbo.add(number, slots)

    def _knows(self, _place: int) -> None:
        """While ids are not read there are no slots that would have to leave the list."""

    def _withdraw(self, place: int) -> bool:
        # Other ranks find it at another of their calls: no list without it would be theirs.
        self._unusable = self._out_of_step(str(self._refusals.pop()))
        return False

    def _out_of_step(self, why: str) -> GroupBroken:
        return GroupBroken(
            f"group {self._group.name}: rank {self._group.rank} cannot stay in step: {why}; the group's slots are kept "
            "until all its ranks have ended"
        )
