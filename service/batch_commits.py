"""Changes of the slot table that a window consists of: some slots freed, some granted, each written in one go.

The same record and the same stores as staging the parts and committing them
(:mod:`~mambapool.service.table_writer`), so that a recovery cannot tell. What is stored after the commit point is
what went into the record, not read back from it: ids that are bytes there and an index already here are made
neither again.
"""

from __future__ import annotations

import struct

import numpy as np

from mambapool.pool import slot_table as st
from mambapool.service.ledger import Generations, Index
from mambapool.service.table_writer import FREE, GRANT, WORD, SlotTableWriter

# Native: the table is of this machine, and the standard layout is written byte by byte.
_put2 = struct.Struct("@2Q").pack_into
_put3 = struct.Struct("@3Q").pack_into
_put4 = struct.Struct("@4Q").pack_into


class BatchCommits:
    """Commits of one table: stage :meth:`free`, :meth:`grant`, :meth:`window`, each once or not, then :meth:`commit`.

    Nothing may be staged with the table's own methods meanwhile.
    """

    def __init__(self, table: SlotTableWriter) -> None:
        self._map = table.mapping
        self._items = table.items
        self._owner = table.owners
        self._request = table.requests
        self._generation = table.generations
        self._order = table.orders
        layout = table.layout
        self._owner_at = layout.field(st.OWNER)
        self._request_at = layout.field(st.REQUEST)
        self._generation_at = layout.field(st.GENERATION)
        self._order_at = layout.field(st.ORDER)
        self._record = layout.redo
        self._start = layout.redo + 2
        self._end = self._start
        self._freed: tuple[Index, int, int, int] | None = None
        self._granted: tuple[Index, list[int] | Generations, int, int] | None = None
        self._window: tuple[int, int] | None = None

    def free(self, packed: bytes, index: Index, order: int, applied_address: int, applied: int) -> None:
        """Stage: these are free, numbered from ``order`` on; their session's applied word is ``applied``."""
        at = self._end
        _put4(self._map, 8 * at, FREE | len(index) << 8, order, applied_address, applied)
        self._end = self._put_ids(at + 4, packed)
        self._freed = (index, order, applied_address, applied)

    def grant(
        self, packed: bytes, index: Index, generations: list[int] | Generations, owner: int, request: int
    ) -> None:
        """Stage: these belong to ``owner`` (an owner word) by ``request``."""
        at = self._end
        _put3(self._map, 8 * at, GRANT | len(index) << 8, owner, request)
        at = 8 * self._put_ids(at + 3, packed)
        end = at + 8 * len(index)
        if isinstance(generations, list):
            struct.pack_into(f"@{len(index)}Q", self._map, at, *generations)
        else:
            self._map[at:end] = generations.tobytes()
        self._end = end // 8
        self._granted = (index, generations, owner, request)

    def window(self, address: int, request: int) -> None:
        """Stage: what ``request`` granted is its session's window; 0: it has none. ``address`` is its word."""
        _put3(self._map, 8 * self._end, WORD, address, request)
        self._end += 3
        self._window = (address, request)

    def commit(self, free_count: int) -> None:
        """Make everything staged true at once."""
        items = self._items
        _put2(self._map, 8 * self._record, self._end, free_count)
        sequence = items[st.H_SEQ] + 1
        items[st.H_SEQ] = sequence
        freed, granted = self._freed, self._granted
        if freed is not None:
            index, order, address, applied = freed
            if isinstance(index, list):
                for place, slot in enumerate(index, order):
                    items[self._order_at + slot] = place
                    items[self._owner_at + slot] = 0
            else:
                self._order[index] = np.arange(order, order + len(index), dtype=np.uint64)
                self._owner[index] = 0
            items[address] = applied
        if granted is not None:
            index, generations, owner, request = granted
            if isinstance(index, list):
                for slot, generation in zip(index, generations, strict=True):
                    items[self._request_at + slot] = request
                    items[self._generation_at + slot] = generation
                    items[self._owner_at + slot] = owner
            else:
                self._request[index] = request
                self._generation[index] = generations
                self._owner[index] = owner
        if self._window is not None:
            address, request = self._window
            items[address] = request
        items[st.H_FREE_COUNT] = free_count
        items[st.H_DONE] = sequence
        self._end = self._start
        self._freed = self._granted = self._window = None

    def _put_ids(self, at: int, packed: bytes) -> int:
        if len(packed) & 4:
            # A single id is read back as a whole word: nothing of an earlier record may be left in its half.
            packed += b"\0\0\0\0"
        end = 8 * at + len(packed)
        self._map[8 * at : end] = packed
        return end // 8
