"""The allocator that schedulers see: SGLang's ``MambaSlotAllocator``, over the slots of a shared pool."""

from __future__ import annotations

from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

from mambapool.client.forms import drain, packed, tagged, whole_number
from mambapool.client.record import HELD
from mambapool.client.slot_messages import SlotMessages
from mambapool.client.turn import Turn
from mambapool.pool import protocol
from mambapool.pool.errors import MambaPoolError
from mambapool.pool.index_tensors import slot_ids
from mambapool.pool.slot_table import H_FREE_COUNT, H_WAITING


class SlotAllocator(SlotMessages):
    """Hands out slots of a pool that other processes use too. SGLang's names, meanings and order.

    Exhaustion is ``None``; a window is all or nothing. Misuse raises an
    :class:`~mambapool.pool.errors.InvalidSlots` that names the slots and changes nothing.

    Safe to use from several threads; a window belongs to the client, not to the thread that opened it.
    After a fork the child's copy raises :class:`~mambapool.pool.errors.ForkedClient`. Slot tensors are shared
    views: clone one before writing into it.
    """

    #: Whether slots are offered by :meth:`offer_later`, when a GPU is done with them.
    offers_later = False

    def __repr__(self) -> str:
        window = f", window of {len(self._window)} left" if self._window_open else ""
        return f"SlotAllocator(session={self._transport.number}, size={self.size}{window})"

    def available_size(self) -> int:
        """How many slots an ``alloc`` could get now; no message: read from the slot table.

        Free slots, and those that this client has given back and the allocator has not yet applied; within its
        limit. 0 while somebody waits for slots: they are theirs first.
        """
        # In this order: what is freed inside is posted before it is taken off its list.
        if self._freed_inside or self._unapplied or self._refusals or self._careful:
            return self._available_with_pending()
        items = self._table_items
        return 0 if items[H_WAITING] else items[H_FREE_COUNT]

    def schedulable_available_size(self) -> int:
        """The same number: this pool is static, as SGLang's is."""
        return self.available_size()

    @property
    def free_slots(self) -> torch.Tensor:
        """The free list as far as this client can know it, head first: int64 on :attr:`device`.

        A new tensor at each call: changing it frees nothing. Waits until what was posted is applied.
        """
        with self._calls:
            self._check_usable()
            return self._list_of(self._transport.settle())

    def alloc(
        self, need_size: SupportsIndex, timeout: float | None = None, tag: str | None = None
    ) -> torch.Tensor | None:
        """``need_size`` slots as an int64 tensor of shape ``(need_size,)``, or None: not so many are free.

        ``alloc(1)`` inside a window costs no message; everything else is one round trip. With ``timeout`` it
        waits so many seconds for slots, first come, first served; while somebody waits, nobody overtakes.

        ``tag``, 1 to 128 bytes of printable text, is shown by ``mambapool audit``: what the slots are for. Inside a
        window that of the window stands.
        """
        if tag is not None:
            protocol.check_tag(tag)
        if need_size == 1:
            try:
                slot = self._window.pop()
            except IndexError:
                pass
            else:
                self._marks[slot] = 1
                return self._cached[slot]
            if self._collects and timeout is None and tag is None:
                return self._alloc_one()
        return self._alloc_by_message(need_size, timeout, tag)

    def alloc_group_begin(self, num_reqs: SupportsIndex, partial: bool = False, tag: str | None = None) -> None:
        """Open a window of ``num_reqs`` slots, which ``alloc(1)`` then drains without messages.

        All or nothing, unless ``partial``: then as many as there are. When nothing comes, no window is open
        and ``alloc`` asks one by one. The rest of a window that is still open is given back first.

        ``tag`` is shown by ``mambapool audit`` for all of its slots.
        """
        if tag is not None:
            protocol.check_tag(tag)
        count = whole_number(num_reqs)
        with self._calls:
            self._check_usable()
            if count == 0:
                self._end()
                return
            carried = self._close_window(protocol.FREE)
            # No pool has more slots, and the wire carries no larger number than an int32.
            reply = self._ask(protocol.BEGIN, carried, min(count, self.size + 1), bool(partial), *tagged(tag))
            if reply[2] == protocol.NONE:
                return
            self._open_window(reply)

    def alloc_group_end(self) -> None:
        """Close the window: one message, unawaited, with what was freed inside and what is left unused."""
        with self._calls:
            self._check_usable()
            self._end()

    def free(self, free_index: torch.Tensor, after: Any = None) -> None:
        """Give slots back: an integer tensor of one dimension or none, or a list of ints. Never waits.

        Values are taken as they are at the call. Empty ones do nothing. A free that the allocator refuses is
        raised at this client's next call. ``after`` is for GPUs: memory of the host has no work under way.
        """
        slot = self._slot_by_id.get(id(free_index), 0)
        if slot and self._window_open and self._collects and not self._refusals:
            # What an engine frees most. Without the lock, which takes longer than all of this: each step is one that
            # the GIL makes whole. If two threads free the same slot at once, the allocator finds it.
            marks = self._marks
            if marks[slot] == HELD:
                marks[slot] = 0
                self._freed_inside.append(slot)
                if not self._window_open:
                    self._leave_late()  # what closed the window may not have seen it
                return
        slot = slot or self._slot_of(free_index)
        slots = [slot] if slot > 0 else slot_ids(free_index, size=self._largest_id(), what="free")
        if self._unusable is not None or self._refusals:
            self._check_usable()
        if not slots:
            return
        with self._lock:
            if slot > 0 and self._marks[slot] == HELD:
                self._marks[slot] = 0
            else:
                self._record.give_back(slots)
            self._take_back(slots)
        if self._unapplied and not self._window_open:
            self._transport.flush()
            self._forget_applied()

    def clear(self) -> None:
        """Free everything that this client holds, and nothing of anybody else; ends its window.

        When that leaves the whole pool free, its list is 1..size again.
        """
        with self._calls:
            self._check_usable()
            unused = drain(self._window)
            with self._lock:
                self._window_open = False
                freed = len(self._freed_inside)
                count = self._record.clear() + freed + len(unused)
                self._posted.append(protocol.CLEAR, None, count)
                del self._freed_inside[:freed]
                self._clears += 1
            self._transport.flush()

    def held(self) -> list[int]:
        """What this client holds and may free, ascending; its window's unused slots are not among it."""
        with self._lock:
            self._record.take_back_ended()
            return self._record.held()

    def disable(self, reason: MambaPoolError) -> None:
        """Every later call raises ``reason``; takes no lock, so that a forked child can call it."""
        self._unusable = reason
        self._careful = True
        self._window = []
        self._window_open = False
        # In a forked child the old one may be held by a thread that exists in the parent only.
        self._calls = Turn(self._transport)

    def hold(self, slots: list[int]) -> torch.Tensor:
        """These became this client's by a transfer: as the tensor that ``alloc`` would return."""
        with self._lock:
            self._record.hold(slots)
        return self._tensors.copy_of(slots)

    def hold_unless_cleared(self, slots: list[int], clears: int) -> torch.Tensor | None:
        """:meth:`hold`, or None if ``clear()`` was called since :attr:`clears` was that."""
        with self._lock:
            if clears != self._clears:
                return None
            self._record.hold(slots)
        return self._tensors.copy_of(slots)

    @property
    def clears(self) -> int:
        """How often ``clear()`` was called."""
        return self._clears

    def offering(self, slots: list[int]) -> None:
        """An offer of these is about to be sent: they cannot be freed until more is known."""
        self._check_usable()
        with self._lock:
            self._record.offering(slots)

    def offered(self, slots: list[int]) -> None:
        """The offer was made, or is taken back by now: the slot table tells which."""
        with self._lock:
            self._record.offered(slots)

    def end_offer(self, slots: list[int]) -> bool:
        """The allocator refuses an offer of these: they are plainly this client's again.

        False if none of them is: an allocator that died before it answered had made the offer, and the receiver
        was there before the repeat.
        """
        with self._lock:
            return self._record.end_offer(slots)

    def offer_later(self, slots: torch.Tensor, receiver: int) -> None:
        """Offer slots to another session without waiting; only if :attr:`offers_later`."""
        raise NotImplementedError

    def _largest_id(self) -> int:
        return self.size

    def _take_back(self, slots: list[int]) -> None:
        """Under the lock: freed slots, in call order, on their way to the allocator."""
        if self._window_open:
            self._freed_inside += slots
        else:
            self._posted.append(protocol.FREE, packed(slots), len(slots))

    def _list_of(self, free: npt.NDArray[np.int64]) -> torch.Tensor:
        """The free list, of which the slot table knows ``free``."""
        with self._lock:
            ids = np.concatenate((free, np.array(self._freed_inside, np.int64)))
        return self._tensors.copy_of(ids)

    def _available_with_pending(self) -> int:
        self._check_usable()
        with self._lock:
            applied, free = self._table.applied_and_free(self._row)
            pending = self._posted.forget_applied(applied) + len(self._freed_inside)
            if self._table_items[H_WAITING]:
                return 0
            if self._limit == self.size:
                return free + pending
            held = self._record.count() + len(self._window)
            return max(min(free + pending, self._limit - held), 0)

    def _slot_of(self, value: object) -> int:
        """The slot, if ``value`` is one of our slot tensors or a view of one; read from its address."""
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_meta:
            return -1
        slot = self._tensors.slot_at(value.data_ptr())
        if slot > 0 and value.dtype is torch.int64 and value.numel() == 1 and value.dim() < 2:
            if self._debug:
                self._tensors.check()
            return slot
        return -1
