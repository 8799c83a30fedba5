"""The other ranks of a group without a guarantee: they take part through the page, and send no message."""

from __future__ import annotations

from typing import SupportsIndex

import torch

from mambapool.client.arguments import check_timeout
from mambapool.client.forms import drain, whole_number
from mambapool.client.group_calls import GroupCalls
from mambapool.pool import group_calls as calls
from mambapool.pool import protocol
from mambapool.pool.group_calls import call_word


class FollowerAllocator(GroupCalls):
    """:class:`~mambapool.client.allocator.SlotAllocator` whose answers are rank 0's.

    An answer that is not there yet is waited for: rank 0 makes the same call, if it has not already.
    """

    def available_size(self) -> int:
        """Rank 0's count at this call."""
        with self.in_turn():
            return self.shared.number(call_word(calls.AVAILABLE_SIZE), _rank_0_does)

    @property
    def free_slots(self) -> torch.Tensor:
        """The free list as rank 0 knows it at this call."""
        with self.in_turn():
            slots = self.shared.slots(call_word(calls.FREE_SLOTS), _rank_0_grants)
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
            slots = self.shared.slots(call, _rank_0_grants, timeout or 0.0)
            if slots is None:
                return None
            with self._lock:
                self._record.hold(slots)
        return self._as_tensor(slots)

    def alloc_group_begin(self, num_reqs: SupportsIndex, partial: bool = False, tag: str | None = None) -> None:
        """Open the window that rank 0 opens."""
        if tag is not None:
            protocol.check_tag(tag)
        count = whole_number(num_reqs)
        with self.in_turn():
            drain(self._window)
            call = call_word(calls.BEGIN, count, int(bool(partial)))
            slots = self.shared.slots(call, _rank_0_grants)
            with self._lock:
                self._record.put_in_window(slots or [])
            self._window = (slots or [])[::-1]

    def alloc_group_end(self) -> None:
        """Close the window."""
        with self.in_turn():
            self._group.begin(call_word(calls.END))
            self._group.compare()
            drain(self._window)

    def clear(self) -> None:
        """Free everything that the group holds, as rank 0 does."""
        with self.in_turn():
            self.shared.number(call_word(calls.CLEAR), _rank_0_does)
            drain(self._window)
            with self._lock:
                self._record.clear()

    def _take_back(self, slots: list[int]) -> None:
        """They are rank 0's to give back."""


def _rank_0_does() -> int:
    raise AssertionError("only rank 0 does this")


def _rank_0_grants() -> list[int] | None:
    raise AssertionError("only rank 0 does this")
