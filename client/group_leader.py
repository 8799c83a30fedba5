"""Rank 0 of a group without a guarantee: asks the allocator for all, and answers the others through the page."""

from __future__ import annotations

from typing import Any, SupportsIndex

import torch

from mambapool.client.arguments import check_timeout
from mambapool.client.forms import drain, packed, tagged, whole_number
from mambapool.client.group import Group
from mambapool.client.group_calls import GroupCalls
from mambapool.client.limbo import Limbo
from mambapool.client.posted import Posted
from mambapool.client.transport import Transport
from mambapool.pool import group_calls as calls
from mambapool.pool import protocol
from mambapool.pool.group_calls import call_word


class LeaderAllocator(GroupCalls):
    """:class:`~mambapool.client.allocator.SlotAllocator` that speaks for its group.

    What the group frees stays in its limbo until every rank has passed that free, and is what an alloc gets that the
    pool cannot serve. An allocator that does not answer is an error on every rank.
    """

    def __init__(self, transport: Transport, device: torch.device | str, group: Group, **options: Any) -> None:
        super().__init__(transport, device, group, **options)
        self._limbo = Limbo()
        #: How often something has left it.
        self._left = 0
        #: The allocator has a window open that has ended here: it is told with the next slots.
        self._window_owed = False
        self._got: list[int] = []

    def available_size(self) -> int:
        """How many slots an ``alloc`` could get now, those in limbo included; the same number on every rank."""
        call = call_word(calls.AVAILABLE_SIZE)
        with self.in_turn():
            return self.shared.number(call, self._count_available)

    @property
    def free_slots(self) -> torch.Tensor:
        """The free list as far as rank 0 can know it, head first, with what is in limbo at its end."""
        call = call_word(calls.FREE_SLOTS)
        with self.in_turn():
            slots = self.shared.slots(call, self._list_free)
        return self._tensors.copy_of(slots or [])

    def alloc(
        self, need_size: SupportsIndex, timeout: float | None = None, tag: str | None = None
    ) -> torch.Tensor | None:
        """``need_size`` slots, the same ones on every rank, or None on every rank; rank 0's ``tag`` is shown."""
        if tag is not None:
            protocol.check_tag(tag)
        if need_size == 1 and self._window and (slot := self._take_from_window()) is not None:
            return slot
        count = whole_number(need_size)
        if timeout is not None:
            check_timeout(timeout)
        if count == 0:
            return self._no_slots()
        call = call_word(calls.ALLOC, count, int(bool(timeout)))
        with self.in_turn():
            slots = self.shared.slots(call, lambda: self._serve(count, timeout, tag))
        return None if slots is None else self._as_tensor(slots)

    def alloc_group_begin(self, num_reqs: SupportsIndex, partial: bool = False, tag: str | None = None) -> None:
        """Open a window of ``num_reqs`` slots on every rank; what is left of one that is open is given back."""
        if tag is not None:
            protocol.check_tag(tag)
        count = whole_number(num_reqs)
        call = call_word(calls.BEGIN, count, int(bool(partial)))
        with self.in_turn():
            self.shared.slots(call, lambda: self._open(count, bool(partial), tag))

    def alloc_group_end(self) -> None:
        """Close the window. The allocator hears of it when what goes back with it has left the limbo."""
        with self.in_turn():
            number = self._group.begin(call_word(calls.END))
            self._leave_window(number)
        self._give_back()

    def clear(self) -> None:
        """Free everything that the group holds. Waits until every rank has come to its ``clear()``, too."""
        call = call_word(calls.CLEAR)
        with self.in_turn():
            self.shared.number(call, self._clear)

    @property
    def is_busy(self) -> bool:
        return super().is_busy or (self._group.fences is not None and bool(self._limbo))

    def tick(self) -> None:
        """For the background thread: what every rank has passed leaves the limbo, also while nobody calls."""
        super().tick()
        if self._unusable is None and (self._limbo or self._window_owed):
            self._give_back()

    def _serve(self, count: int, timeout: float | None, tag: str | None) -> list[int] | None:
        if count > self.size:
            self._check_usable()
            return None
        left = self._left
        slots = self._ask_for(count, None, tag)
        if slots is None:
            slots = self._reuse(count, tag, left)
        if slots is None and timeout:
            slots = self._ask_for(count, timeout, tag)
        return slots

    def _ask_for(self, count: int, timeout: float | None, tag: str | None) -> list[int] | None:
        """From the allocator."""
        return None if self._alloc_by_message(count, timeout, tag) is None else self._got

    def _reuse(self, count: int, tag: str | None, left: int) -> list[int] | None:
        """From the limbo, and what it lacks from the allocator, which was asked before when ``left`` had left it."""
        with self._lock:
            kept, number = self._limbo.take(count)
            if not kept and left == self._left:  # else the background thread has given the allocator something
                return None
        got: list[int] | None = []
        if len(kept) < count:
            try:
                got = self._ask_for(count - len(kept), None, tag)
            except BaseException:
                got = None
                raise
            finally:
                if got is None:
                    with self._lock:
                        self._limbo.put_back(number, kept)
        if got is None:
            return None
        with self._lock:
            self._record.hold(kept)
        return got + kept

    def _granted(self, reply: list[Any], *, locked: bool = False) -> torch.Tensor | None:
        if reply[2] != protocol.NONE:
            self._got = protocol.unpack_ids(reply[3]).tolist()
        return super()._granted(reply, locked=locked)

    def _open(self, count: int, partial: bool, tag: str | None) -> list[int] | None:
        number = self._group.position
        self._leave_window(number)
        if count == 0:
            self._check_usable()
            return None
        with self._calls:
            self._check_usable()
            with self._lock:
                carried = self._post_freed(protocol.FREE)
                left = self._left
            # No pool has more slots, and the wire carries no larger number than an int32.
            reply = self._ask(protocol.BEGIN, carried, min(count, self.size + 1), partial, *tagged(tag))
            granted = reply[2] != protocol.NONE
            with self._lock:
                # Both at once: the background thread tells the allocator of a window that has ended here.
                self._window_owed = self._window_open = granted
        slots: list[int] = protocol.unpack_ids(reply[3]).tolist() if granted else []
        if partial:
            with self._lock:
                slots += self._limbo.take(count - len(slots))[0]
        elif not granted and count <= self.size:
            slots = self._reuse(count, tag, left) or []
        self._tensors.make(slots)
        with self._lock:
            self._record.put_in_window(slots)
            self._window = slots[::-1]
            self._window_open = bool(slots)
        return slots or None

    def _leave_window(self, number: int) -> None:
        unused = drain(self._window)
        with self._lock:
            self._window_open = False
            self._limbo.add(number, unused)

    def _clear(self) -> int:
        self._check_usable()
        self._group.await_ranks(self._group.position)
        with self._lock:
            self._freed_inside, _ = self._limbo.take(len(self._limbo))
        self._window_owed = False
        super().clear()
        return 0

    def _count_available(self) -> int:
        free = super().available_size()
        with self._lock:
            kept = len(self._limbo)
            if self._limit < self.size:
                held = self._record.count() + len(self._window) + kept
                free = max(min(free, self._limit - held), 0)
            return free + kept

    def _list_free(self) -> list[int]:
        self._check_usable()
        free: list[int] = self._transport.settle().tolist()
        with self._lock:
            return free + self._limbo.slots()

    def _take_back(self, slots: list[int]) -> None:
        self._limbo.add(self._group.position, slots)

    def _post_freed(self, op: int) -> Posted | None:
        """Under the lock: number what has left the limbo, to be carried along."""
        passed = self._limbo.take_passed(self._group.passed()) if self._limbo else []
        self._left += bool(passed)
        return self._posted.append(op, packed(passed), len(passed)) if passed else None

    def _give_back(self) -> None:
        """Post what has left the limbo, with the end of a window that the allocator has not heard of."""
        with self._lock:
            ends = self._window_owed and not self._window_open
            if self._post_freed(protocol.END if ends else protocol.FREE) is None:
                if self._limbo or not ends:
                    return
                self._posted.append(protocol.END, None, 0)
            if ends:
                self._window_owed = False
        self._transport.flush()
        self._forget_applied()
