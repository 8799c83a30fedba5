"""The allocator of a session on a GPU with a guarantee."""

from __future__ import annotations

from typing import Any

from mambapool.client.background import background
from mambapool.client.fenced import Fenced
from mambapool.client.fenced_limbo import Entry
from mambapool.client.forms import drain
from mambapool.client.guaranteed import GuaranteedAllocator


class FencedGuaranteed(Fenced, GuaranteedAllocator):
    """:class:`GuaranteedAllocator` on a GPU: what it frees stays its own, so that nothing of it is fenced.

    Slots whose ids only the device knows are on the list too, and handed out again as they came. Only slots that
    came by a transfer leave the process, behind a fence.
    """

    def clear(self) -> None:
        """Free everything that this client holds, but for what is on offer; the list is in ascending order again."""
        self._check_usable()
        self._fences.check()
        self._catch_up()
        drain(self._window)
        with self._lock:
            self._record.take_back_ended()
            slots = set(self._record.held()) if self._ids is None else self._ids.held()
            slots |= {slot for slot in map(self._slot_at, self._limbo.clear()) if slot is not None}
            self._forget_held()
            self._list.clear()
            self._list.extend(sorted(self._guaranteed))
            self._window_open = False
            self._put_in_limbo(sorted(slots - self._guaranteed), ())
        background().wake()

    def _take_back_after(self, places: list[int], events: tuple[Any, ...]) -> None:
        foreign = [place for place in places if self._is_foreign(place)]
        self._list.extend(place for place in places if place not in foreign)
        self._put_in_limbo(foreign, events)

    def _withdraw(self, place: int) -> bool:
        try:
            self._list.remove(place)
        except ValueError:  # another thread's alloc(1) has it
            return super()._withdraw(place)
        return True

    def _knows(self, place: int) -> None:
        if self._is_foreign(place) and self._withdraw(place):
            self._put_in_limbo([place], ())

    def _is_foreign(self, place: int) -> bool:
        slot = self._slot_at(place)
        return slot is not None and slot not in self._guaranteed

    def _put_in_limbo(self, places: list[int], events: tuple[Any, ...]) -> None:
        if places:
            self._limbo.put(Entry(places, self._fences.issue(), events))
