"""Changes of the slot table that touch one slot, or free one and grant one: each written in one go.

The same record and the same stores in the same order as staging the parts and committing them
(:mod:`~mambapool.service.table_writer`), so that a recovery cannot tell; but what is stored after the commit
point is what was just packed, not read back from the record. They are by far the most frequent changes, and
between two messages of different clients the processor's caches are cold: fewer lines of code count there.
"""

from __future__ import annotations

import struct

from mambapool.pool import slot_table as st
from mambapool.service.table_writer import FREE_ONE, GRANT_ONE, SlotTableWriter

# Native: the table is of this machine, and the standard layout is written byte by byte.
_put_part = struct.Struct("@7Q").pack_into
_put_both = struct.Struct("@12Q").pack_into


class OneSlotCommits:
    """Commits of one table. Nothing may be staged there meanwhile."""

    def __init__(self, table: SlotTableWriter) -> None:
        self._map = table.mapping
        self._items = table.items
        layout = table.layout
        self._record = layout.redo
        self._record_byte = 8 * layout.redo
        self._owner = layout.field(st.OWNER)
        self._request = layout.field(st.REQUEST)
        self._generation = layout.field(st.GENERATION)
        self._order = layout.field(st.ORDER)
        self._applied = layout.session(0) + st.S_APPLIED

    def grant(self, slot: int, holder: int, request: int, free_count: int) -> None:
        """``slot`` belongs to session number ``holder`` by ``request``."""
        items = self._items
        generation = items[self._generation + slot] + 1
        owner = holder << 8 | st.HELD
        end = self._record + 7
        _put_part(self._map, self._record_byte, end, free_count, GRANT_ONE, owner, request, slot, generation)
        sequence = items[st.H_SEQ] + 1
        items[st.H_SEQ] = sequence
        items[self._request + slot] = request
        items[self._generation + slot] = generation
        items[self._owner + slot] = owner
        items[st.H_FREE_COUNT] = free_count
        items[st.H_DONE] = sequence

    def free(self, slot: int, order: int, row: int, applied: int, free_count: int) -> None:
        """``slot`` is free, the ``order``-th to be so; the applied word of the session in ``row`` is ``applied``."""
        address = self._applied + row * st.SESSION_WORDS
        end = self._record + 7
        _put_part(self._map, self._record_byte, end, free_count, FREE_ONE, order, address, applied, slot)
        items = self._items
        sequence = items[st.H_SEQ] + 1
        items[st.H_SEQ] = sequence
        items[self._order + slot] = order
        items[self._owner + slot] = 0
        items[address] = applied
        items[st.H_FREE_COUNT] = free_count
        items[st.H_DONE] = sequence

    def swap(
        self, freed: int, order: int, row: int, applied: int, slot: int, holder: int, request: int, free_count: int
    ) -> None:
        """:meth:`free` of ``freed``, then :meth:`grant` of ``slot``, which may be the same, in one commit."""
        items = self._items
        generation = items[self._generation + slot] + 1
        owner = holder << 8 | st.HELD
        address = self._applied + row * st.SESSION_WORDS
        _put_both(
            self._map,
            self._record_byte,
            self._record + 12,
            free_count,
            FREE_ONE,
            order,
            address,
            applied,
            freed,
            GRANT_ONE,
            owner,
            request,
            slot,
            generation,
        )
        sequence = items[st.H_SEQ] + 1
        items[st.H_SEQ] = sequence
        items[self._order + freed] = order
        items[self._owner + freed] = 0
        items[address] = applied
        items[self._request + slot] = request
        items[self._generation + slot] = generation
        items[self._owner + slot] = owner
        items[st.H_FREE_COUNT] = free_count
        items[st.H_DONE] = sequence
