"""The ranks of a group with a guarantee: the same list on every rank, run locally; nobody waits for anybody."""

from __future__ import annotations

from typing import Any, SupportsIndex

import torch

from mambapool.client.arguments import check_timeout
from mambapool.client.forms import packed, whole_number
from mambapool.client.group import Group
from mambapool.client.group_calls import ALLOC_ONE, GroupCalls
from mambapool.client.guaranteed import GuaranteedAllocator
from mambapool.client.limbo import Limbo
from mambapool.client.transport import Transport
from mambapool.pool import group_calls as calls
from mambapool.pool import protocol
from mambapool.pool.errors import NotHolder
from mambapool.pool.group_calls import call_word


class GroupGuaranteedAllocator(GroupCalls, GuaranteedAllocator):
    """:class:`~mambapool.client.guaranteed.GuaranteedAllocator` on one rank of a group.

    Calls are compared with rank 0's every few calls, at every window, and when there is time. Slots that came by a
    transfer go back to the pool when every rank has passed their free.
    """

    def __init__(self, transport: Transport, device: torch.device | str, group: Group, **options: Any) -> None:
        super().__init__(transport, device, group, **options)
        #: Of slots that came by a transfer; rank 0's only.
        self._group_limbo = Limbo()

    def alloc(
        self, need_size: SupportsIndex, timeout: float | None = None, tag: str | None = None
    ) -> torch.Tensor | None:
        """``need_size`` slots, or None. ``timeout`` waits for nothing: what could free some is the next call."""
        if timeout is not None:
            check_timeout(timeout)
        call = ALLOC_ONE if need_size == 1 else call_word(calls.ALLOC, whole_number(need_size))
        if tag is not None:
            protocol.check_tag(tag)  # before it is a call
        if self._unusable is not None:
            self._check_local()
        with self._group.lock:
            self._group.begin(call)
            return super().alloc(need_size)

    def available_size(self) -> int:
        """How many slots of the guarantee are free: the same number on every rank that has come as far."""
        if self._unusable is not None:
            self._check_local()
        with self._group.lock:
            self._group.begin(_AVAILABLE_SIZE)
        return len(self._list)

    def alloc_group_begin(self, num_reqs: SupportsIndex, partial: bool = False, tag: str | None = None) -> None:
        """Open a window of ``num_reqs`` slots; all or nothing, unless ``partial``."""
        call = call_word(calls.BEGIN, whole_number(num_reqs), int(bool(partial)))
        if tag is not None:
            protocol.check_tag(tag)
        with self.in_turn():
            self._group.begin(call)
            self._group.compare()
            super().alloc_group_begin(num_reqs, partial)

    def alloc_group_end(self) -> None:
        """Close the window: what is left unused goes to the end of the list."""
        with self.in_turn():
            self._group.begin(call_word(calls.END))
            self._group.compare()
            super().alloc_group_end()

    def clear(self) -> None:
        """Free everything that this group holds, but for what is on offer."""
        with self.in_turn():
            self._group.begin(call_word(calls.CLEAR))
            super().clear()

    def begin_offer(self, slots: list[int]) -> list[int]:
        """As :meth:`GroupCalls.begin_offer`; refused before it is a call, as the allocator would refuse it."""
        if granted := [slot for slot in slots if slot in self._guaranteed]:
            raise NotHolder("slots of a guarantee cannot be transferred: they are its holder's", granted)
        return super().begin_offer(slots)

    def tick(self) -> None:
        """For the background thread."""
        super().tick()
        if self._group_limbo and self._unusable is None:
            with self._lock:
                passed = self._group_limbo.take_passed(self._group.passed())
                if passed:
                    self._posted.append(protocol.FREE, packed(passed), len(passed))
            self._transport.flush()
            self._forget_applied()

    def _check_usable(self) -> None:
        # No call here has an answer: what the allocator refused is raised by the next one that has, on every rank.
        self._check_local()

    def _give_transferred(self, slots: list[int]) -> None:
        if not self._group.rank:
            self._group_limbo.add(self._group.position, slots)


_AVAILABLE_SIZE = call_word(calls.AVAILABLE_SIZE)
