"""Which slot is free and who holds the others: one pool's list, without any I/O.

The free list is a ring of int32 in SGLang's order: slots are taken from the head and come back at the
tail in the order given. Why not a deque, or a stack: a ring is cut and joined by numpy in one copy, and
first-in-first-out keeps a slot away from its next holder for as long as possible, which is also what makes
tensor-parallel ranks agree.

Beside it lies one int32 per slot: the holder's number while it is held, a negative stamp while it is free.
The stamps differ within one batch, so that writing them and reading them back finds a slot named twice
without sorting. No call here costs more in a larger pool, except :meth:`Ledger.release`, which a whole
holder's end needs, and :meth:`Ledger.check`.
"""

from __future__ import annotations

import sys
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from mambapool.pool.errors import DoubleFree, DuplicateSlot, NotHolder, ReservedSlot, SlotOutOfRange

Ids: TypeAlias = npt.NDArray[np.int32]
Generations: TypeAlias = npt.NDArray[np.uint64]
#: Ids to go through: few as a list, many as numpy indexes with them, which makes this of any other array, each time.
Index: TypeAlias = list[int] | npt.NDArray[np.intp]

#: Added to the holder's number while a slot is offered to somebody: still the giver's, but not to be freed.
OFFERED = 1 << 30

#: Up to here a loop over memoryviews is faster than numpy's fixed cost per call (measured: 30–60 ns a slot).
SMALL_BATCH = 16

_ONE = np.uint64(1)


class Ledger:
    """The slots 1..``slots`` of one pool. Every refusal is an :class:`InvalidSlots` and changes nothing."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.free_count = slots
        #: How often each slot was handed out; index 0 is unused.
        self.generation = np.zeros(slots + 1, np.uint64)
        #: The order number that the next freed slot gets; free slots sorted by it are the free list.
        self.next_order = slots + 1
        self._ring: Ids = np.arange(1, slots + 1, dtype=np.int32)
        self._head = 0
        self._state = np.full(slots + 1, -1, np.int32)
        #: What freed slots of one batch are marked with.
        self._stamps = np.arange(-1, -1 - slots, -1, dtype=np.int32)
        # Scalars through memoryviews of the same arrays: numpy's own scalar indexing is three times slower.
        self._ring_items = self._ring.data
        self._state_items = self._state.data
        self._generation_items = self.generation.data

    @classmethod
    def restore(cls, holders: Ids, orders: npt.NDArray[np.uint64], generations: Generations) -> Self:
        """The list as a slot table has it: per row the holder (0: free), order of its last free, generation.

        Index 0 is the reserved row. Free rows sorted by their order are the free list.
        """
        ledger = cls(len(holders) - 1)
        free = np.flatnonzero(holders[1:] == 0) + 1
        free = free[np.argsort(orders[free], kind="stable")]
        ledger.free_count = len(free)
        ledger._ring[: len(free)] = free
        ledger._state[1:] = np.where(holders[1:] == 0, -1, holders[1:])
        ledger.generation[:] = generations
        ledger.next_order = int(orders.max()) + 1
        return ledger

    def __repr__(self) -> str:
        return f"Ledger(slots={self.slots}, free={self.free_count})"

    def holder_of(self, slot: int) -> int:
        """The number of the slot's holder, 0 while it is free."""
        return max(self._state_items[slot], 0) & ~OFFERED

    @property
    def states(self) -> Ids:
        """Per slot its holder's number, with :data:`OFFERED` while it is offered, or something negative: free."""
        return self._state

    def generation_of(self, slot: int) -> int:
        return self._generation_items[slot]

    def free_slots(self) -> Ids:
        """A copy of the free list, head first."""
        end = self._head + self.free_count
        if end <= self.slots:
            return self._ring[self._head : end].copy()
        return np.concatenate((self._ring[self._head :], self._ring[: end - self.slots]))

    def held_by(self, holder: int) -> Ids:
        """The slots of one holder in ascending order, offered ones included; looks at every slot."""
        return np.flatnonzero(self._state & ~OFFERED == holder).astype(np.int32)

    def take_one(self, holder: int) -> int:
        """Hand the head of the list to ``holder``; 0 when nothing is free."""
        if not self.free_count:
            return 0
        slot = self._ring_items[self._head]
        self._head += 1
        if self._head == self.slots:
            self._head = 0
        self.free_count -= 1
        self._state_items[slot] = holder
        self._generation_items[slot] += 1
        return slot

    def take(self, count: int, holder: int) -> tuple[Ids, Generations] | None:
        """Hand ``count`` slots to ``holder``, in list order; None, and no change, when fewer are free.

        Returns the ids and the generation of each.
        """
        taken = self.take_packed(count, holder)
        return None if taken is None else (np.frombuffer(taken[0], np.int32), np.array(taken[2], np.uint64))

    def take_packed(self, count: int, holder: int) -> tuple[bytes, Index, list[int] | Generations] | None:
        """:meth:`take`: the ids as a message and the slot table carry them, the same as an index, generations."""
        if count > self.free_count:
            return None
        # Bytes, and one index for all that follows: a call of numpy costs more than its work at these lengths.
        ring = self._ring_items
        end = self._head + count
        if end <= self.slots:
            packed = ring[self._head : end].tobytes()
        else:
            end -= self.slots
            packed = ring[self._head :].tobytes() + ring[:end].tobytes()
        self._head = end if end < self.slots else end - self.slots
        self.free_count -= count
        if count <= SMALL_BATCH:
            state, counts = self._state_items, self._generation_items
            ids = memoryview(packed).cast("i").tolist()
            handed_out = []
            for slot in ids:
                state[slot] = holder
                counts[slot] = generation = counts[slot] + 1
                handed_out.append(generation)
            return packed, ids, handed_out
        index = np.frombuffer(packed, np.int32).astype(np.intp)
        self._state[index] = holder
        generations = self.generation.take(index)
        generations += _ONE
        self.generation[index] = generations
        return packed, index, generations

    def give_back_one(self, slot: int, holder: int) -> None:
        """Append one slot of ``holder`` to the tail."""
        if not 0 < slot <= self.slots or self._state_items[slot] != holder:
            self._refuse([slot], holder)
        self._state_items[slot] = -1
        tail = self._head + self.free_count
        self._ring_items[tail if tail < self.slots else tail - self.slots] = slot
        self.free_count += 1
        self.next_order += 1

    def swap_one(self, freed: int, holder: int) -> int:
        """:meth:`give_back_one`, then :meth:`take_one`, which may hand out the same slot."""
        state = self._state_items
        if not 0 < freed <= self.slots or state[freed] != holder:
            self._refuse([freed], holder)
        state[freed] = -1
        ring = self._ring_items
        head = self._head
        tail = head + self.free_count
        ring[tail if tail < self.slots else tail - self.slots] = freed
        self.next_order += 1
        slot = ring[head]
        head += 1
        self._head = head if head < self.slots else 0
        state[slot] = holder
        self._generation_items[slot] += 1
        return slot

    def give_back(self, ids: Ids, holder: int) -> None:
        """Append ``ids``, all of ``holder``, each once, to the tail in the order given."""
        self.give_back_packed(ids.tobytes(), holder)

    def give_back_packed(self, packed: bytes, holder: int) -> Index:
        """:meth:`give_back` of little-endian int32, as a message carries them; returns them as an index."""
        count = len(packed) // 4
        index: Index
        if count <= SMALL_BATCH:
            index = memoryview(packed).cast("i").tolist()
            self._mark_few_free(index, holder)
        else:
            index = self._mark_many_free(packed, count, holder)
        ring = self._ring_items
        tail = self._head + self.free_count
        if tail >= self.slots:
            tail -= self.slots
        cut = self.slots - tail
        ids = memoryview(packed).cast("i")
        if count <= cut:
            ring[tail : tail + count] = ids
        else:
            ring[tail:] = ids[:cut]
            ring[: count - cut] = ids[cut:]
        self.free_count += count
        self.next_order += count
        return index

    def release(self, holder: int) -> Ids:
        """Free everything of ``holder`` and return it. When that leaves every slot free, the list is 1..N."""
        ids = self.held_by(holder)
        if len(ids):
            self._state[ids] = -1
            self._append(ids)
        if self.free_count == self.slots:
            self._ring[:] = np.arange(1, self.slots + 1, dtype=np.int32)
            self._head = 0
            self.next_order += self.slots
        return ids

    def offer(self, ids: Ids, holder: int) -> None:
        """Mark slots of ``holder`` as offered; refused whole like :meth:`give_back`."""
        self._mark(ids, holder, holder | OFFERED)

    def withdraw(self, ids: Ids, holder: int) -> None:
        """The offer of these ended without effect."""
        self._state[ids] = holder

    def hand_over(self, ids: Ids, holder: int) -> None:
        """Offered slots become ``holder``'s."""
        self._state[ids] = holder

    def check(self) -> None:
        """Look at every slot: the free list and the holders are a partition of 1..N. O(N)."""
        free = self.free_slots()
        marked_free = np.flatnonzero(self._state[1:] < 0) + 1
        assert np.array_equal(np.sort(free), marked_free), (
            f"the free list {free.tolist()} is not what the slots say: {marked_free.tolist()}"
        )
        assert self._state[0] == -1, f"slot 0 was given to holder {self._state[0]}"
        assert self.free_count == len(free), f"{self.free_count} counted free, {len(free)} listed"

    def _mark(self, ids: Ids, holder: int, mark: int) -> None:
        listed = ids.tolist()
        if len(set(listed)) < len(listed) or any(
            not 0 < slot <= self.slots or self._state_items[slot] != holder for slot in listed
        ):
            self._refuse(listed, holder)
        self._state[ids] = mark

    def _mark_few_free(self, ids: list[int], holder: int) -> None:
        state = self._state_items
        for done, slot in enumerate(ids):
            if not 0 < slot <= self.slots or state[slot] != holder:
                for marked in ids[:done]:
                    state[marked] = holder
                self._refuse(ids, holder)
            state[slot] = -1

    def _mark_many_free(self, packed: bytes, count: int, holder: int) -> npt.NDArray[np.intp]:
        # As unsigned, so that negative ids are out of range instead of counting from the end.
        index = np.frombuffer(packed, np.uint32).astype(np.intp)
        state = self._state
        try:
            # Comparing bytes costs a quarter of comparing arrays at these lengths.
            whose = state.take(index).tobytes()
        except IndexError:
            whose = b""
        if count > self.slots or whose != holder.to_bytes(4, sys.byteorder) * count:
            self._refuse(np.frombuffer(packed, np.int32).tolist(), holder)
        stamps = self._stamps[:count]
        state[index] = stamps
        if state.take(index).tobytes() != stamps.tobytes():
            state[index] = holder
            self._refuse(np.frombuffer(packed, np.int32).tolist(), holder)
        return index

    def _append(self, ids: Ids) -> None:
        tail = self._head + self.free_count
        if tail >= self.slots:
            tail -= self.slots
        end = tail + len(ids)
        if end <= self.slots:
            self._ring[tail:end] = ids
        else:
            cut = self.slots - tail
            self._ring[tail:] = ids[:cut]
            self._ring[: end - self.slots] = ids[cut:]
        self.free_count += len(ids)
        self.next_order += len(ids)

    def _refuse(self, ids: list[int], holder: int) -> None:
        """Raise what is wrong with a batch: the first kind of fault found, with every slot that has it."""
        if faulty := [slot for slot in ids if slot == 0]:
            raise ReservedSlot("slot 0 is the reserved row: it is never handed out and never freed", faulty)
        if faulty := [slot for slot in ids if not 0 < slot <= self.slots]:
            raise SlotOutOfRange(f"slots {_listed(faulty)} are outside 1..{self.slots}", faulty)
        seen: set[int] = set()
        if faulty := [slot for slot in ids if slot in seen or seen.add(slot)]:  # type: ignore[func-returns-value]
            raise DuplicateSlot(f"slots {_listed(faulty)} are named more than once", faulty)
        if faulty := [slot for slot in ids if self._state_items[slot] < 0]:
            raise DoubleFree(f"slots {_listed(faulty)} are already free", faulty)
        faulty = [slot for slot in ids if self._state_items[slot] != holder]
        assert faulty, f"a batch of holder {holder} was refused without a fault: {_listed(ids)}"
        if offered := [slot for slot in faulty if self._state_items[slot] == holder | OFFERED]:
            raise NotHolder(f"slots {_listed(offered)} are offered to another session", offered)
        holders = sorted({self.holder_of(slot) for slot in faulty})
        raise NotHolder(f"slots {_listed(faulty)} are held by {_listed(holders)}, not by {holder}", faulty)


def _listed(items: list[int], most: int = 16) -> str:
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"
