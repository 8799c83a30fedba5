"""The allocator of a session on a GPU without a guarantee."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

from mambapool.client.arguments import check_timeout
from mambapool.client.background import background
from mambapool.client.fenced import Fenced
from mambapool.client.fenced_limbo import Entry
from mambapool.client.forms import drain, packed, tagged, whole_number
from mambapool.client.posted import Posted
from mambapool.pool import protocol
from mambapool.pool.slot_table import H_WAITING

#: Slots that the pool granted, and places of this client's own.
Found = tuple[list[int], list[int]]


class FencedAllocator(Fenced):
    """:class:`SlotAllocator` on a GPU.

    An alloc that the pool cannot serve is served from this client's own limbo: its own streams order that.
    """

    #: Of the open window, those that are this client's own again, and not granted for it.
    _reused: frozenset[int] = frozenset()

    def available_size(self) -> int:
        """Free slots, and those that this client has freed and may have again; within its limit. No message."""
        self._check_usable()
        with self._lock:
            applied, free = self._table.applied_and_free(self._row)
            own = self._posted.forget_applied(applied) + len(self._freed_inside) + self._limbo.count
            if self._table_items[H_WAITING]:
                return 0
            if self._limit == self.size:
                return free + own
            return max(min(free + own, self._limit - self._held() - len(self._window)), 0)

    def alloc_group_begin(self, num_reqs: SupportsIndex, partial: bool = False, tag: str | None = None) -> None:
        """Open a window; all or nothing, unless ``partial``. What the pool lacks comes from this client's limbo.

        ``tag`` is of those that the pool grants; the others keep the one that they had.
        """
        count = whole_number(num_reqs)
        before = self._posted.last
        super().alloc_group_begin(count, partial, tag)
        if self._lacks(count, partial):
            with self._calls:
                if partial:
                    self._fill_window(count)
                else:
                    self._open_with_own(self._own_and_more(protocol.BEGIN, count, before, tag))

    def clear(self) -> None:
        """Free everything that this client holds, but for what is on offer; ends its window."""
        with self._calls:
            self._check_usable()
            self._fences.check()
            self._catch_up()
            self._close_window(protocol.END)
            with self._lock:
                self._record.take_back_ended()
                slots = set(self._record.held()) if self._ids is None else self._ids.held()
                # One that is not known is that of a held one.
                slots |= {slot for slot in map(self._slot_at, self._limbo.clear()) if slot is not None}
                self._forget_held()
                self._limbo.put(Entry(sorted(slots), self._fences.issue(), is_clear=True))
                self._clears += 1
            self._transport.flush()
        background().wake()

    # The steps of opening a window, of which none waits.

    def _lacks(self, count: int, partial: bool) -> bool:
        """Whether a window of so many is to be had from this client's own, which the pool did not give."""
        return len(self._window) < count and (partial or not self._window_open)

    def _fill_window(self, count: int) -> None:
        """Add this client's own to the window, as many as it lacks; without one, open it."""
        with self._lock:
            own = self._take_own(count - len(self._window)).places
            granted = self._window[::-1]
        if own:
            self._open_with_own((granted, own))

    def _open_with_own(self, found: Found | None) -> None:
        """Open a window of what the pool granted and this client's own; None: of nothing."""
        if found is None:
            return
        granted, own = found
        with self._lock:
            self._tensors.make(own + granted)
            self._reused = frozenset(own)
            self._window = [*granted, *own][::-1]
            self._window_open = True

    def _list_of(self, free: npt.NDArray[np.int64]) -> torch.Tensor:
        """The pool's free list, then this client's own limbo."""
        with self._lock:
            return self._tensors.copy_of([*free.tolist(), *self._limbo.all(), *self._freed_inside])

    def _withdraw(self, place: int) -> bool:
        if place in self._freed_inside:
            self._freed_inside.remove(place)
            return True
        return super()._withdraw(place)

    def _take_back_after(self, places: list[int], events: tuple[Any, ...]) -> None:
        if self._window_open and not events:
            self._freed_inside += places
        else:
            self._limbo.put(Entry(places, self._fences.issue(), events))

    def _leave(self, entry: Entry) -> None:
        if entry.is_clear and not (self._limbo or self._window_open or any(self._marks)):
            # Nothing is held but these: then the list is in order again if nobody else holds any.
            self._posted.append(protocol.CLEAR, None, len(entry.places))
        else:
            super()._leave(entry)

    def _close_window(self, op: int) -> Posted | None:
        """What was never used goes back at once; what was freed inside, behind one fence for all of it."""
        unused = drain(self._window)
        with self._lock:
            own = [place for place in unused if place in self._reused]
            unused = [slot for slot in unused if slot not in self._reused]
            self._reused = frozenset()
            self._remember(own)
            self._window_open = False
            if op == protocol.FREE and not unused:
                return None
            return self._posted.append(op, packed(unused) if unused else None, len(unused))

    def _post_freed(self, op: int) -> Posted | None:
        self._remember([])
        return None

    def _remember(self, more: list[int]) -> None:
        """Under the lock: what was freed inside a window, and ``more``, is fenced."""
        places = self._freed_inside + more
        self._freed_inside = []
        if places:
            self._limbo.put(Entry(places, self._fences.issue()))
            background().wake()

    def _alloc_by_message(
        self, need_size: SupportsIndex, timeout: float | None, tag: str | None
    ) -> torch.Tensor | None:
        count = whole_number(need_size)
        if timeout is not None:
            check_timeout(timeout)
        self._catch_up()
        before = self._posted.last
        slots = super()._alloc_by_message(count, None, tag)
        if slots is None and count <= self.size:
            slots = self._alloc_own(count, before, tag)
        if slots is None and timeout is not None and timeout > 0:
            return super()._alloc_by_message(count, timeout, tag)
        return slots

    def _alloc_own(self, count: int, posted_before: int, tag: str | None) -> torch.Tensor | None:
        """What the pool has, and the rest from this client's limbo; all or nothing."""
        with self._calls:
            return self._hold_found(self._own_and_more(protocol.ALLOC, count, posted_before, tag))

    def _hold_found(self, found: Found | None) -> torch.Tensor | None:
        """They are the caller's."""
        if found is None:
            return None
        places = [*found[0], *found[1]]
        with self._lock:
            self._record.hold(places)
        return self._tensors.get(places[0]) if len(places) == 1 else self._tensors.copy_of(places)

    def _own_and_more(self, op: int, count: int, posted_before: int, tag: str | None) -> Found | None:
        """What :meth:`_find` finds, asked for by this thread."""
        with contextlib.closing(self._find(count, posted_before)) as steps:
            try:
                missing = next(steps)
                while True:
                    missing = steps.send(self._ask(op, None, missing, False, *tagged(tag)))
            except StopIteration as end:
                found: Found | None = end.value
                return found

    def _find(self, count: int, posted_before: int) -> Generator[int, list[Any], Found | None]:
        """After the pool could not give ``count``: what it gives, and this client's own; None if not enough.

        As much as possible from the pool, as the one list would give it; but how much that is may have changed. Yields
        how many to ask the allocator for, and takes its reply; closed instead, it has changed nothing.
        """
        for from_pool in (self._table.free_count, 0):
            with self._lock:
                own = self._take_own(max(count - from_pool, 1))
            missing = count - len(own.places)
            if not missing:
                return [], own.places
            # What the background thread gave back since then is in the pool now.
            reply = None
            try:
                if own.places or self._posted.last != posted_before:
                    reply = yield missing
            finally:
                if reply is None or reply[2] == protocol.NONE:
                    with self._lock:
                        if own.places:
                            self._limbo.put_back(own)
            if reply is not None and reply[2] != protocol.NONE:
                granted = [reply[3]] if type(reply[3]) is int else protocol.unpack_ids(reply[3]).tolist()
                return granted, own.places
        return None

    def _take_own(self, count: int) -> Entry:
        """Under the lock. While others wait for slots, it is theirs first."""
        return Entry([], 0) if self._table_items[H_WAITING] else self._limbo.take(count)

    def _held(self) -> int:
        return self._record.count() - (self._ids.unknown if self._ids is not None else 0)
