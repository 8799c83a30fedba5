"""The slot table: the file in which the allocator writes, per slot, who holds it.

It is the allocator's durable state and everybody else's read-only view of it. All of it is little-endian
64-bit words, so that each value is written and read by one aligned access, and a field's address is a word
index. In order:

==========  ==================================================================================
header      512 words: what the file is, the epoch, ``seq``, ``done``, the free count
sessions    24 words for each of ``max_sessions``
rows        five arrays of ``slots + 1`` words: owner, request, generation, order, offered
redo        the change that is being written, as absolute new values
==========  ==================================================================================

A change is written in this order: (1) the redo record, (2) ``seq += 1``, the commit point, (3) rows, session
and counters, (4) ``done = seq``, (5) the reply. So ``seq != done`` means that (3) is under way, or was when
the allocator died. A reader that wants several words of one moment reads ``done`` first and ``seq`` last,
and reads again when they differ.

A row's owner word is ``holder << 8 | kind``, 0 while the slot is free. A slot is in a window when its
request word is its session's ``window`` word: so ending a window is one store, however many slots were
in it. ``order`` numbers frees: free rows sorted by it are the free list. It is kept while a slot is held.
A row's offered word is ``offer << 32 | receiver``, 0 while it is on offer to nobody: the slots of one holder with
one such word are one offer.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from mambapool.pool.errors import AllocatorUnavailable, ProtocolError, RuntimeDirError, VersionMismatch
from mambapool.pool.regular_files import open_regular

MAGIC: Final = int.from_bytes(b"MAMBPOOL", "little")
LAYOUT_VERSION: Final = 3

# Header words. SEQ, DONE and FREE_COUNT change with every call and have a cache line of their own.
H_MAGIC: Final = 0
H_VERSION: Final = 1
H_UUID: Final = 2  # two words
H_SLOTS: Final = 4
H_MAX_SESSIONS: Final = 5
H_DIGEST: Final = 6  # two words
H_EPOCH: Final = 8
H_CREATED: Final = 9  # 1: a client made the pool; it ends with its last session
H_NEXT_SESSION: Final = 10
H_LOST: Final = 11  # 1: a keeper died, the states are gone
H_SEQ: Final = 16
H_DONE: Final = 17
H_FREE_COUNT: Final = 18
H_WAITING: Final = 19  # slots that somebody waits for: while there are any, nobody else gets one
HEADER_WORDS: Final = 512

# Words of a session.
S_NUMBER: Final = 0  # 0: nobody
S_LEASE: Final = 1  # two words
S_APPLIED: Final = 3  # number of the last posted message that was applied
S_WINDOW: Final = 4  # request id of the BEGIN whose window is open, 0: none
S_RANK: Final = 5
S_GROUP: Final = 6  # the session that founded its group, 0: it is in none
S_GUARANTEE: Final = 7
S_LIMIT: Final = 8
S_PID: Final = 9
S_NAME: Final = 10  # six words of UTF-8, cut off and padded with zeros
S_WORLD_SIZE: Final = 16
S_GROUP_NAME: Final = 17  # six words, as the name
SESSION_WORDS: Final = 24
NAME_BYTES: Final = 48

# The row arrays, in the order in which they lie.
OWNER: Final = 0
REQUEST: Final = 1
GENERATION: Final = 2
ORDER: Final = 3
OFFERED: Final = 4
ROW_FIELDS: Final = 5

# Kinds of an owner word.
HELD: Final = 1

#: A reader gives up after this long of seq != done: the allocator died in the middle of a change.
TORN_READ_S: Final = 1.0

Words = npt.NDArray[np.uint64]


#: Of an offered word: the session to which the slot is on offer.
RECEIVER_BITS: Final = 0xFFFFFFFF


def owner_word(holder: int) -> int:
    return holder << 8 | HELD


def offered_word(receiver: int, request: int) -> int:
    """``request``, the OFFER's id, is cut to 32 bits: no two offers that are open at once are so far apart."""
    return (request & 0xFFFFFFFF) << 32 | receiver


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Word addresses in a table of so many slots and sessions."""

    slots: int
    max_sessions: int

    @property
    def sessions(self) -> int:
        return HEADER_WORDS

    @property
    def rows(self) -> int:
        return self.sessions + self.max_sessions * SESSION_WORDS

    @property
    def redo(self) -> int:
        return self.rows + ROW_FIELDS * (self.slots + 1)

    @property
    def redo_words(self) -> int:
        # The largest change names every slot twice (a window given back and taken anew), with two words of
        # ids and one of generation for each pair, besides its fixed part and single words. A holder's end
        # names its slots up to four times, by ids only.
        return 1024 + 2 * (self.slots + 1) * 2

    @property
    def size_bytes(self) -> int:
        size = (self.redo + self.redo_words) * 8
        return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE

    def session(self, row: int) -> int:
        """The address of a session's first word."""
        return self.sessions + row * SESSION_WORDS

    def field(self, field: int) -> int:
        """The address of word 0 of a row array."""
        return self.rows + field * (self.slots + 1)


def open_table(path: Path, flags: int) -> int:
    """A descriptor of the file; :class:`RuntimeDirError` when it cannot be opened, or is no regular file."""
    try:
        return open_regular(path, flags)
    except OSError as error:
        raise RuntimeDirError(f"cannot open the slot table {path}: {error.strerror}") from error


class SlotTableReader:
    """A read-only view of a slot table, for clients and checks. Safe in several threads."""

    def __init__(self, path: Path, uuid: bytes | None = None) -> None:
        """Map the table at ``path``; refused when it is no slot table, or another pool's than ``uuid``."""
        self.path = path
        fd = open_table(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            if size < HEADER_WORDS * 8:
                raise ProtocolError(f"{path} is no slot table: {size} bytes")
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
        self.words: Words = np.frombuffer(self._map, np.uint64)
        #: Scalars: a memoryview item is one aligned load and three times faster than numpy's.
        self.items = memoryview(self._map).cast("Q")
        self.layout = self._check(size, uuid)

    def _check(self, size: int, uuid: bytes | None) -> TableLayout:
        items = self.items
        if items[H_MAGIC] != MAGIC:
            raise ProtocolError(f"{self.path} is no slot table")
        if items[H_VERSION] != LAYOUT_VERSION:
            raise VersionMismatch(
                f"{self.path} has layout version {items[H_VERSION]}, this process reads {LAYOUT_VERSION}"
            )
        layout = TableLayout(items[H_SLOTS], items[H_MAX_SESSIONS])
        if size != layout.size_bytes:
            raise ProtocolError(f"{self.path} has {size} bytes, its header says {layout.size_bytes}")
        if uuid is not None and bytes(self._map[H_UUID * 8 : H_UUID * 8 + 16]) != uuid:
            raise ProtocolError(f"{self.path} is another pool's slot table")
        return layout

    @property
    def epoch(self) -> int:
        return self.items[H_EPOCH]

    @property
    def free_count(self) -> int:
        return self.items[H_FREE_COUNT]

    def applied_and_free(self, session_row: int) -> tuple[int, int]:
        """What the allocator has applied for a session, and the free count, of one moment."""
        items = self.items
        applied_address = self.layout.session(session_row) + S_APPLIED
        deadline = 0.0
        while True:
            done = items[H_DONE]
            applied = items[applied_address]
            free = items[H_FREE_COUNT]
            if items[H_SEQ] == done:
                return applied, free
            deadline = self._wait_for_writer(deadline)

    def applied_and_free_slots(self, session_row: int) -> tuple[int, npt.NDArray[np.int64]]:
        """What is applied for a session, and the free list, head first, of one moment. Looks at every row."""
        base = self.layout.field(OWNER)
        order = self.layout.field(ORDER)
        count = self.layout.slots + 1
        deadline = 0.0
        while True:
            done = self.items[H_DONE]
            applied = self.items[self.layout.session(session_row) + S_APPLIED]
            owners = self.words[base : base + count].copy()
            orders = self.words[order : order + count].copy()
            if self.items[H_SEQ] == done:
                break
            deadline = self._wait_for_writer(deadline)
        free = np.flatnonzero(owners[1:] == 0) + 1
        return applied, free[np.argsort(orders[free], kind="stable")]

    def granted(self, owner: int, request: int) -> npt.NDArray[np.int64]:
        """What an owner word has by one request, in the order in which it was granted. Looks at every row."""
        owners, requests, orders = (
            self.words[self.layout.field(field) :][: self.layout.slots + 1] for field in (OWNER, REQUEST, ORDER)
        )
        mine = np.flatnonzero((owners == owner) & (requests == request))
        return mine[np.argsort(orders[mine], kind="stable")]

    def session_number(self, row: int) -> int:
        """The number of the session that has this row, 0: none."""
        return self.items[self.layout.session(row) + S_NUMBER]

    def holder_of(self, slot: int) -> int:
        """The number of the slot's holder, 0 while it is free."""
        return self.items[self.layout.field(OWNER) + slot] >> 8

    def request_of(self, slot: int) -> int:
        """The request by which its holder got the slot."""
        return self.items[self.layout.field(REQUEST) + slot]

    def offered_to(self, slot: int) -> int:
        """The session to which the slot is on offer, 0: none."""
        return self.items[self.layout.field(OFFERED) + slot] & RECEIVER_BITS

    def generation_of(self, slot: int) -> int:
        return self.items[self.layout.field(GENERATION) + slot]

    @staticmethod
    def _wait_for_writer(deadline: float) -> float:
        # The writer needs microseconds, unless it was preempted: give it the core.
        now = time.monotonic()
        if not deadline:
            return now + TORN_READ_S
        if now > deadline:
            raise AllocatorUnavailable(
                f"the slot table was in the middle of a change for {TORN_READ_S:g} s: the allocator "
                "stopped or died there"
            )
        time.sleep(0)
        return deadline
