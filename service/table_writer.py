"""Writes the slot table: every change first as a redo record, then in place.

A change is staged (each call appends to the redo record), then committed. Nothing outside the record is
stored before the commit point, and all that is stored after it is read back from the record: the normal path
and a recovery that applies the record again are one function. All values in a record are absolute, so
that applying it twice, or over half of itself, ends the same.

The record: ``[length, free_count, part, part, …]`` in words. A part begins with ``code | count << 8``:

=====  ================================================================================
GRANT  owner, request, ids (two int32 a word), one generation a word
FREE   order of the first id, address of the applied word, its value, ids
WORD   address, value
OFFER  value of the offered words (receiver, or 0), ids
MOVE   owner, request, ids: whose offer was accepted
=====  ================================================================================
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from mambapool.pool import slot_table as st
from mambapool.pool.errors import RuntimeDirError
from mambapool.service.ledger import SMALL_BATCH, Generations, Ids
from mambapool.service.table_contents import SlotTableContents

GRANT, FREE, WORD, _OFFER, _MOVE = 1, 2, 3, 4, 5
_HEAD_WORDS = 2

#: First words of the parts of one slot, for those who write a whole record at once.
GRANT_ONE, FREE_ONE = GRANT | 1 << 8, FREE | 1 << 8

_put3 = struct.Struct("@3Q").pack_into
_put5 = struct.Struct("@5Q").pack_into
_get2 = struct.Struct("@2Q").unpack_from
_get4 = struct.Struct("@4Q").unpack_from


class SlotTableWriter(SlotTableContents):
    """The slot table of one pool. One per file, used by the allocator's one thread."""

    def __init__(self, path: Path, layout: st.TableLayout, mapping: mmap.mmap) -> None:
        super().__init__(path, layout, mapping)
        self._map = mapping
        self._items = self.items
        self._ids = self._words.view(np.int32)
        self._id_items = self._ids.data
        self._owner_at = layout.field(st.OWNER)
        self._request_at = layout.field(st.REQUEST)
        self._generation_at = layout.field(st.GENERATION)
        self._order_at = layout.field(st.ORDER)
        self._start = layout.redo + _HEAD_WORDS
        self._end = self._start

    @classmethod
    def create(
        cls,
        path: Path,
        layout: st.TableLayout,
        *,
        uuid: bytes,
        digest: bytes,
        epoch: int,
        created_by_client: bool = False,
    ) -> Self:
        """A new table in which every slot is free."""
        table = cls(path, layout, _create(path, layout.size_bytes))
        items = table._items
        table._order[:] = np.arange(layout.slots + 1, dtype=np.uint64)
        items[st.H_VERSION] = st.LAYOUT_VERSION
        items[st.H_SLOTS] = layout.slots
        items[st.H_MAX_SESSIONS] = layout.max_sessions
        items[st.H_EPOCH] = epoch
        items[st.H_CREATED] = int(created_by_client)
        items[st.H_NEXT_SESSION] = 1
        items[st.H_FREE_COUNT] = layout.slots
        table._words[st.H_UUID : st.H_UUID + 2] = np.frombuffer(uuid, np.uint64)
        table._words[st.H_DIGEST : st.H_DIGEST + 2] = np.frombuffer(digest, np.uint64)
        items[st.H_MAGIC] = st.MAGIC
        return table

    @classmethod
    def recover(cls, path: Path) -> Self:
        """The table that another allocator left: a change that it had committed is finished.

        Raises what :class:`~mambapool.pool.slot_table.SlotTableReader` does when it is no such table.
        """
        layout = st.SlotTableReader(path).layout
        fd = st.open_table(path, os.O_RDWR)
        try:
            table = cls(path, layout, mmap.mmap(fd, layout.size_bytes))
        finally:
            os.close(fd)
        table._finish()
        return table

    def _finish(self) -> None:
        """Do again what a commit may have done in part: the same words are stored, so that nothing is lost."""
        items = self._items
        if items[st.H_SEQ] != items[st.H_DONE]:
            self._apply()
            items[st.H_DONE] = items[st.H_SEQ]

    @property
    def epoch(self) -> int:
        return self._items[st.H_EPOCH]

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        """One store: clients that see it know that the allocator is another one."""
        self._items[st.H_EPOCH] = epoch

    def set_waiting(self, slots: int) -> None:
        """How many slots somebody waits for; not durable, so that it needs no commit."""
        self._items[st.H_WAITING] = slots

    def set_lost(self) -> None:
        """The states are gone; one store, which every client sees."""
        self._items[st.H_LOST] = 1

    # Staging: appends to the record.

    def grant_one(self, slot: int, generation: int, owner: int, request: int) -> None:
        """Stage: ``slot`` belongs to ``owner`` (an owner word) by ``request``."""
        _put5(self._map, self._end * 8, GRANT_ONE, owner, request, slot, generation)
        self._end += 5

    def grant(self, ids: Ids, generations: Generations, owner: int, request: int) -> None:
        """Stage: all of ``ids`` belong to ``owner`` by ``request``."""
        count = len(ids)
        at = self._end
        _put3(self._map, at * 8, GRANT | count << 8, owner, request)
        at = self._put_ids(at + 3, ids, count)
        self._words[at : at + count] = generations
        self._end = at + count

    def free_one(self, slot: int, order: int, applied_address: int, applied: int) -> None:
        """Stage: ``slot`` is free, the ``order``-th to be so; its session's applied word is ``applied``."""
        _put5(self._map, self._end * 8, FREE_ONE, order, applied_address, applied, slot)
        self._end += 5

    def free(self, ids: Ids, order: int, applied_address: int, applied: int) -> None:
        """Stage: all of ``ids`` are free, numbered from ``order`` on."""
        count = len(ids)
        at = self._end
        _put3(self._map, at * 8, FREE | count << 8, order, applied_address)
        self._items[at + 3] = applied
        self._end = self._put_ids(at + 4, ids, count)

    def word(self, address: int, value: int) -> None:
        """Stage one word of the header or of a session."""
        _put3(self._map, self._end * 8, WORD, address, value)
        self._end += 3

    def offer(self, ids: Ids, word: int) -> None:
        """Stage: ``ids`` are offered, with that offered word; 0: to nobody any more."""
        count = len(ids)
        at = self._end
        self._items[at] = _OFFER | count << 8
        self._items[at + 1] = word
        self._end = self._put_ids(at + 2, ids, count)

    def move(self, ids: Ids, owner: int, request: int) -> None:
        """Stage: ``ids``, which were offered, belong to ``owner`` by ``request``."""
        count = len(ids)
        at = self._end
        _put3(self._map, at * 8, _MOVE | count << 8, owner, request)
        self._end = self._put_ids(at + 3, ids, count)

    def commit(self, free_count: int) -> None:
        """Make everything staged true at once."""
        items = self._items
        items[self._start - 2] = self._end
        items[self._start - 1] = free_count
        sequence = items[st.H_SEQ] + 1
        items[st.H_SEQ] = sequence
        self._apply()
        items[st.H_DONE] = sequence
        self._end = self._start

    def _apply(self) -> None:
        """Store what the record says; the same whether it was just staged or left by a dead process."""
        items = self._items
        at = self._start
        end = items[at - 2]
        while at < end:
            code = items[at]
            count = code >> 8
            code &= 0xFF
            if code == FREE:
                at = self._apply_free(at + 1, count)
            elif code == GRANT:
                at = self._apply_grant(at + 1, count)
            elif code == _OFFER:
                self._offered[self._index(at + 2, count)] = items[at + 1]
                at += 2 + (count + 1) // 2
            elif code == _MOVE:
                index = self._index(at + 3, count)
                self._request[index] = items[at + 2]
                self._owner[index] = items[at + 1]
                self._offered[index] = 0
                at += 3 + (count + 1) // 2
            else:
                assert code == WORD, f"unknown part {code} in the redo record of {self.path}"
                address, value = _get2(self._map, (at + 1) * 8)
                items[address] = value
                at += 3
        items[st.H_FREE_COUNT] = items[self._start - 1]

    def _apply_grant(self, at: int, count: int) -> int:
        items = self._items
        owner, request, slot, generation = _get4(self._map, at * 8)
        if count == 1:
            items[self._request_at + slot] = request
            items[self._generation_at + slot] = generation
            items[self._owner_at + slot] = owner
            return at + 4
        ids_at = at + 2
        values_at = ids_at + (count + 1) // 2
        end = values_at + count
        if count <= SMALL_BATCH:
            ids = self._id_items[2 * ids_at : 2 * ids_at + count]
            for slot, generation in zip(ids, items[values_at:end], strict=True):
                items[self._request_at + slot] = request
                items[self._generation_at + slot] = generation
                items[self._owner_at + slot] = owner
        else:
            index = self._index(ids_at, count)
            self._request[index] = request
            self._generation[index] = self._words[values_at:end]
            self._owner[index] = owner
        return end

    def _apply_free(self, at: int, count: int) -> int:
        items = self._items
        order, address, applied, slot = _get4(self._map, at * 8)
        ids_at = at + 3
        if count == 1:
            items[self._order_at + slot] = order
            items[self._owner_at + slot] = 0
        elif count <= SMALL_BATCH:
            ids = self._id_items[2 * ids_at : 2 * ids_at + count]
            for place, slot in enumerate(ids, order):
                items[self._order_at + slot] = place
                items[self._owner_at + slot] = 0
        else:
            index = self._index(ids_at, count)
            self._order[index] = np.arange(order, order + count, dtype=np.uint64)
            self._owner[index] = 0
        items[address] = applied
        return ids_at + (count + 1) // 2

    def _index(self, at: int, count: int) -> npt.NDArray[np.intp]:
        return self._ids[2 * at : 2 * at + count].astype(np.intp)

    def _put_ids(self, at: int, ids: Ids, count: int) -> int:
        if count & 1:
            # A single id is read back as a whole word: nothing of an earlier record may be left in its half.
            self._items[at + count // 2] = 0
        self._ids[2 * at : 2 * at + count] = ids
        return at + (count + 1) // 2

    def remove(self) -> None:
        """Unlink the file; it stays for whoever has it mapped."""
        self.path.unlink(missing_ok=True)


def _create(path: Path, size_bytes: int) -> mmap.mmap:
    """Map a new file of zeros at ``path``, allocated whole: on a full tmpfs a hole is SIGBUS later."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            # Not a rewrite of the old file: whoever still maps that must not see it change under them.
            draft.rename(path)
            return mmap.mmap(fd, size_bytes)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        raise RuntimeDirError(
            f"cannot make the slot table {path} of {size_bytes} bytes: {error.strerror}; "
            "free space there or name another directory with --dir"
        ) from error
