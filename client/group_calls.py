"""What the allocators of all ranks of a group have in common: calls are numbered, checked against rank 0's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mambapool.client.allocator import SlotAllocator
from mambapool.client.group import Group
from mambapool.client.group_answers import Following, Leading
from mambapool.client.group_record import GroupRecord, Undecided
from mambapool.client.transport import Transport
from mambapool.pool.errors import MambaPoolError, PoolLost
from mambapool.pool.group_calls import ALLOC, FREE, call_word, digest
from mambapool.pool.index_tensors import slot_ids
from mambapool.pool.slot_table import H_LOST

if TYPE_CHECKING:
    from mambapool.client.fences import Event

#: alloc(1), by far the most frequent call.
ALLOC_ONE = call_word(ALLOC, 1)
FREE_ONE = call_word(FREE, 1)


class GroupCalls(SlotAllocator):
    """A rank's allocator: each call on every rank, in the same order, with the same answer.

    Also reads that decide something, such as :meth:`available_size`, are calls. Misuse that the client finds raises
    before the call counts. A rank whose call is not rank 0's gets :class:`~mambapool.pool.errors.RankDiverged`, the
    others :class:`~mambapool.pool.errors.GroupBroken`.
    """

    _collects = False
    _record_kind = GroupRecord
    _record: GroupRecord

    def __init__(self, transport: Transport, device: torch.device | str, group: Group, **options: Any) -> None:
        super().__init__(transport, device, **options)
        self._group = group
        #: For what rank 0 does, and all get the answer of.
        self.shared: Leading | Following = Following(group) if group.rank else Leading(group)
        # The slots of all ranks are those of rank 0's session.
        self._record.session = group.holder

    def free(self, free_index: torch.Tensor, after: Any = None) -> None:
        """Give slots back, on every rank. They leave the group when each rank has come this far.

        On GPUs they do when each rank's work that was queued before has finished, too, and its events ``after`` are
        over. Ids on the device that are no slot tensors are read, which waits for the current stream; with a guarantee
        they are not.
        """
        fences = self._group.fences
        events = () if fences is None else fences.check(after)
        slot = self._slot_of(free_index)
        slots = [slot] if slot >= 0 else slot_ids(free_index, size=self._largest_id(), what="free")
        if not slots:
            return
        if self._unusable is not None or self._table_items[H_LOST]:
            self._check_local()
        word = FREE_ONE | slots[0] if len(slots) == 1 else free_word(slots)
        with self._group.lock:
            try:
                with self._lock:
                    self._record.give_back(slots)
            except Undecided:
                if fences is not None:
                    fences.after(events)
                self._ask_whether_back(word, slots)
                with self._lock:
                    self._record.give_back(slots)
            else:
                # Not under the lock of the record: it may wait for a rank, and the background thread must not.
                if fences is not None:
                    fences.after(events)
                self._group.begin(word)
            with self._lock:
                self._take_back(slots)

    def disable(self, reason: MambaPoolError) -> None:
        """Every later call raises ``reason``, and the one that waits for another rank."""
        super().disable(reason)
        self._group.leave(reason)

    def begin_offer(self, slots: list[int]) -> list[int]:
        """These cannot be freed from now on. Returns those that were on offer before: see :meth:`check_offer`."""
        with self._lock:
            return self._record.begin_offer(slots)

    def undo_offer(self, slots: list[int], before: list[int]) -> None:
        """Their offer was refused; those of ``before`` had been on offer before it."""
        with self._lock:
            self._record.undo_offer(slots, before)

    def check_offer(self, before: list[int]) -> None:
        """Rank 0, in a call that all get the answer of: refuse if an offer before this one has not ended."""
        self.check_refused()
        with self._lock:
            self._record.check_back(before)

    def are_ours(self, slots: list[int]) -> bool:
        """Rank 0: whether the slot table says now that the group holds all of these."""
        return all(map(self._record.is_ours, slots))

    def check_refused(self) -> None:
        """Rank 0, in a call that all get the answer of: raise what the allocator has refused before.

        Only there: an error that one rank alone gets makes its next calls others than those of the other ranks.
        """
        super()._check_usable()

    @property
    def is_busy(self) -> bool:
        """Whether the background thread has something to look at soon."""
        return self._group.fences is not None and self._group.fences.is_busy

    def tick(self) -> None:
        """For the background thread."""
        if (fences := self._group.fences) is not None:
            fences.publish()
            if fences.failed is not None and self._unusable is None:
                self._unusable = fences.failed
        self._group.tick()

    def events(self) -> list[Event]:
        """The callers' events that have to be over before this rank may end."""
        return [] if self._group.fences is None else self._group.fences.events()

    def is_over(self, event: Event) -> bool:
        return self._group.fences is None or self._group.fences.is_event_over(event)

    def meet(self) -> None:
        """Wait until every rank has come as far as this one, as an engine's ranks do in an all-reduce; no call itself.

        :class:`~mambapool.pool.errors.GroupBroken` when one has ended, or does not come within the timeout.
        """
        with self.in_turn():
            self._group.meet()

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """One call at a time, of a client that is neither closed nor forked."""
        self._check_local()
        with self._group.lock:
            yield

    def _take_from_window(self) -> torch.Tensor | None:
        """An alloc(1) that needs no answer: every rank has the same window. None: that is used up."""
        if self._unusable is not None or self._table_items[H_LOST]:
            self._check_local()
        with self._group.lock:
            if not self._window:
                return None
            self._group.begin(ALLOC_ONE)
            slot = self._window.pop()
            self._marks[slot] = 1
        return self._tensors.get(slot)

    def _check_local(self) -> None:
        """What ends this client at once. What the allocator refused is told to all ranks, with an answer."""
        if (reason := self._unusable) is not None:
            raise type(reason)(*reason.args)
        if self._table_items[H_LOST]:
            raise PoolLost("the memory of this pool is gone, its keeper died: connect again when it is back")

    def _ask_whether_back(self, word: int, slots: list[int]) -> None:
        """Make a free of slots that were on offer: rank 0 looks whether they are plainly the group's again.

        Each rank by itself would find another answer if just then the offer ends, or is accepted.
        """

        def look() -> int:
            self.check_refused()
            with self._lock:
                self._record.check_back(slots)
            return 0

        self.shared.number(word, look)
        with self._lock:
            self._record.end_offers(slots)

    def _no_slots(self) -> torch.Tensor:
        return self._tensors.copy_of([])

    def _as_tensor(self, slots: list[int]) -> torch.Tensor:
        if len(slots) == 1:
            return self._tensors.get(slots[0])
        return self._tensors.copy_of(slots)


def free_word(slots: list[int]) -> int:
    """A free of several as a call word."""
    return call_word(FREE, len(slots), digest(np.array(slots, "<i4").tobytes()))
