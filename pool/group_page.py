"""The group page: the mapped file through which the ranks of one tensor-parallel group stay in step.

The allocator makes it when the first rank attaches, says in it who has joined and who has ended, and removes it
with the group; the ranks' clients do the rest among themselves. All of it is little-endian 64-bit words. In
order:

========  ====================================================================================
header    64 words: what the file is, and whether the group is complete, ready, or in trouble
ranks     16 words for each rank: its session, position, fence, end, accusation
logs      per rank a ring of its last ``LOG`` calls, two words each: the call and a check
answers   a ring of rank 0's last ``ANSWERS`` answers, eight words each
data      a ring of int32, to which answers of several ids point
========  ====================================================================================

A rank numbers its calls from 1 on. Its position is the number of the call that it made last: whatever it did
before that call it has done, on the CPU. Its fence is the number of the call up to which its GPU has finished what
was queued before; :data:`NO_FENCE` where there is none, and the position says it all. Both only grow.

A call is one word (:mod:`~mambapool.pool.group_calls`). A log entry's second word is the call's number mixed with the
first, and an answer carries its number and a checksum: a record that is torn, old, or seen in parts, as on
a processor that reorders stores, is not taken for the one that was looked for.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from mambapool.pool.errors import ConfigError, ProtocolError, RuntimeDirError, VersionMismatch
from mambapool.pool.regular_files import open_regular

MAGIC: Final = int.from_bytes(b"MAMBAGRP", "little")
LAYOUT_VERSION: Final = 1

#: A group's end is one change of the slot table, whose redo record has room for so many sessions.
MAX_WORLD_SIZE: Final = 256

#: So many calls a rank may be ahead of the slowest one; then it waits.
LEAD: Final = 1024
# Twice the lead: rank 0 may write a record while the slowest reads the one that is LEAD calls older.
ANSWERS: Final = 2 * LEAD
# Four times: a rank compares calls with rank 0, which may be as far ahead of it as it was ahead of rank 0 before.
LOG: Final = 4 * LEAD

GROUP_NAME = re.compile(r"[A-Za-z0-9._-]{1,48}")

# Header words.
H_MAGIC: Final = 0
H_VERSION: Final = 1
H_NUMBER: Final = 2  # of the group: the session that founded it
H_WORLD_SIZE: Final = 3
H_SLOTS: Final = 4
H_FORMED: Final = 5  # 1: all ranks have joined
H_READY: Final = 6  # rank 0's session, when it has attached, its guarantee included
H_TROUBLE: Final = 7  # 1: a rank has ended, or accuses one: look at the ranks' words
HEADER_WORDS: Final = 64

# Words of a rank: two cache lines, so that ranks do not take them from each other.
R_SESSION: Final = 0  # 0: has not joined
R_PID: Final = 1
R_POSITION: Final = 2
R_FENCE: Final = 3
R_END: Final = 4  # how it ended; written by the allocator
R_FAULT: Final = 5  # what this rank says is wrong: kind | rank << 8; written by itself
R_FAULT_CALL: Final = 6  # … at which call
RANK_WORDS: Final = 16

# Ends of a rank.
LEFT: Final = 1
DIED: Final = 2
EVICTED: Final = 3
END_TEXTS: Final = {LEFT: "left", DIED: "died", EVICTED: "was evicted"}

# Faults.
DIVERGED: Final = 1  # this rank made another call than rank 0
LAGGED: Final = 2  # the rank that is named did not come in time

#: Fence of a rank without a GPU: its position is its fence.
NO_FENCE: Final = 2**64 - 1

_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: neighbouring numbers differ in all bytes
_MASK = 2**64 - 1

_two_words = struct.Struct("<2Q")
_answer = struct.Struct("<8Q")
_answer_body = struct.Struct("<7Q")


class Answer(NamedTuple):
    """What rank 0 got for a call. ``value`` is a slot or a number if ``data_items`` is 0; else ids are in the data.

    Of an error the data are the ids at fault, as many as ``value`` says, and the text.
    """

    call: int
    status: int
    value: int
    data_items: int
    data_at: int
    data_check: int


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Word addresses in a page of so many ranks and slots."""

    world_size: int
    slots: int

    def rank(self, rank: int) -> int:
        return HEADER_WORDS + rank * RANK_WORDS

    def log(self, rank: int) -> int:
        return self.rank(self.world_size) + rank * LOG * 2

    @property
    def answers(self) -> int:
        return self.log(self.world_size)

    @property
    def data(self) -> int:
        return self.answers + ANSWERS * 8

    @property
    def data_items(self) -> int:
        """int32 items in the data ring: an answer of every slot fits while another one is being read."""
        return 2 * (self.slots + 1) + 2 * ANSWERS

    @property
    def size_bytes(self) -> int:
        size = self.data * 8 + self.data_items * 4
        return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class GroupPage:
    """A mapped group page. Who may write what is said at each method; nothing here waits."""

    def __init__(self, path: Path) -> None:
        """Map the page at ``path``; refused when it is no group page, or one of another version."""
        self.path = path
        try:
            fd = open_regular(path, os.O_RDWR)
        except OSError as error:
            raise RuntimeDirError(f"cannot open the group page {path}: {error.strerror}") from error
        try:
            info = os.fstat(fd)
            if info.st_size < HEADER_WORDS * 8:
                raise ProtocolError(f"{path} is no group page: {info.st_size} bytes")
            self._map = mmap.mmap(fd, info.st_size)
        finally:
            os.close(fd)
        #: Scalars: a memoryview item is one aligned load or store.
        self.items = memoryview(self._map).cast("Q")
        self.layout = self._check(info.st_size)
        self._logs = [self.layout.log(rank) * 8 for rank in range(self.layout.world_size)]
        self._ranks = [self.layout.rank(rank) for rank in range(self.layout.world_size)]
        self._answers = self.layout.answers * 8
        self._data = memoryview(self._map)[self.layout.data * 8 :][: self.layout.data_items * 4]

    @classmethod
    def create(cls, path: Path, number: int, world_size: int, slots: int) -> GroupPage:
        """A new page, allocated whole: on a full tmpfs a hole is SIGBUS later."""
        layout = GroupLayout(world_size, slots)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.unlink(missing_ok=True)
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, layout.size_bytes)
                header = [MAGIC, LAYOUT_VERSION, number, world_size, slots]
                os.pwrite(fd, struct.pack(f"<{len(header)}Q", *header), 0)
                draft.rename(path)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
        except OSError as error:
            raise RuntimeDirError(
                f"cannot make the group page {path} of {layout.size_bytes} bytes: {error.strerror}; "
                "free space there or name another directory with --dir"
            ) from error
        return cls(path)

    def _check(self, size: int) -> GroupLayout:
        items = self.items
        if items[H_MAGIC] != MAGIC:
            raise ProtocolError(f"{self.path} is no group page")
        if items[H_VERSION] != LAYOUT_VERSION:
            raise VersionMismatch(
                f"{self.path} has layout version {items[H_VERSION]}, this process reads {LAYOUT_VERSION}: install "
                "the same mambapool on both sides"
            )
        layout = GroupLayout(items[H_WORLD_SIZE], items[H_SLOTS])
        if not 0 < layout.world_size <= MAX_WORLD_SIZE or size != layout.size_bytes:
            raise ProtocolError(f"{self.path} has {size} bytes, its header says {layout.size_bytes}")
        return layout

    # The allocator's: who has joined, who has ended.

    def join(self, rank: int, session: int, pid: int) -> None:
        """The allocator: this rank's session is attached; session 0: it has gone again."""
        at = self._ranks[rank]
        self.items[at + R_PID] = pid
        self.items[at + R_SESSION] = session

    def form(self) -> None:
        """The allocator: all ranks have joined."""
        self.items[H_FORMED] = 1

    def ready(self, session: int) -> None:
        """The allocator: rank 0 is this session, and has the guarantee. Not a flag: another one may take its place."""
        self.items[H_READY] = session

    def end(self, rank: int, how: int) -> None:
        """The allocator: a rank of a formed group has ended; the first word stays."""
        if not self.items[self._ranks[rank] + R_END]:
            self.items[self._ranks[rank] + R_END] = how
        self.items[H_TROUBLE] = 1

    def remove(self) -> None:
        """Unlink the file; it stays for whoever has it mapped."""
        self.path.unlink(missing_ok=True)

    # The ranks'.

    def is_complete(self) -> bool:
        """Whether all ranks have joined, and the rank 0 that is there now is ready."""
        # In this order: who is rank 0 is decided when all have joined.
        return bool(self.items[H_FORMED]) and self.items[H_READY] == self.word(0, R_SESSION)

    def word(self, rank: int, field: int) -> int:
        """One of a rank's words."""
        return self.items[self._ranks[rank] + field]

    def set_fence(self, rank: int, call: int) -> None:
        """That rank: its GPU has finished all that was queued before call number ``call``."""
        self.items[self._ranks[rank] + R_FENCE] = call

    def accuse(self, rank: int, kind: int, of: int, call: int) -> None:
        """That rank: says what is wrong, with whom and since which call; the first word stays."""
        at = self._ranks[rank]
        if not self.items[at + R_FAULT]:
            self.items[at + R_FAULT_CALL] = call
            self.items[at + R_FAULT] = kind | of << 8
            self.items[H_TROUBLE] = 1

    def position(self, rank: int) -> int:
        """The number of the call that a rank made last."""
        return self.items[self._ranks[rank] + R_POSITION]

    def slowest(self) -> tuple[int, int]:
        """The least position of all ranks, and whose it is."""
        items = self.items
        return min((items[at + R_POSITION], rank) for rank, at in enumerate(self._ranks))

    def passed(self) -> int:
        """The last call before which every rank has finished everything, on the CPU and on its GPU."""
        items = self.items
        return min(min(items[at + R_POSITION], items[at + R_FENCE]) for at in self._ranks)

    def log(self, rank: int, number: int, call: int) -> None:
        """That rank: it makes its call number ``number`` now."""
        check = (number * _MIX & _MASK) ^ call
        _two_words.pack_into(self._map, self._logs[rank] + number % LOG * 16, call, check)
        self.items[self._ranks[rank] + R_POSITION] = number

    def logged(self, rank: int, number: int) -> int | None:
        """That call of a rank; None if it is not there yet, or no more."""
        call, check = _two_words.unpack_from(self._map, self._logs[rank] + number % LOG * 16)
        return call if check == (number * _MIX & _MASK) ^ call else None

    def logs_equal(self, rank: int, first: int, last: int) -> bool:
        """Whether a rank's calls ``first`` to ``last`` are seen to be rank 0's; they do not wrap around."""
        start, end = first % LOG * 16, (last % LOG + 1) * 16
        ours, theirs = self._logs[rank], self._logs[0]
        return self._map[ours + start : ours + end] == self._map[theirs + start : theirs + end]

    def write_answer(self, number: int, answer: Answer) -> None:
        """Rank 0: what its call number ``number`` was answered."""
        at = self._answers + number % ANSWERS * 64
        body = _answer_body.pack(number, *answer)
        _answer.pack_into(self._map, at, number, *answer, zlib.crc32(body))

    def answer(self, number: int) -> Answer | None:
        """Rank 0's answer to that call; None if it is not there yet, or seen in parts only."""
        at = self._answers + number % ANSWERS * 64
        known, *fields, check = _answer.unpack_from(self._map, at)
        if known != number or check != zlib.crc32(_answer_body.pack(known, *fields)):
            return None
        return Answer(*fields)

    def write_data(self, at: int, data: bytes) -> None:
        """Rank 0: int32 items from place ``at`` of the endless ring on."""
        ring = self._data
        start = at * 4 % len(ring)
        first = data[: len(ring) - start]
        ring[start : start + len(first)] = first
        if len(first) < len(data):
            ring[: len(data) - len(first)] = data[len(first) :]

    def data(self, answer: Answer) -> bytes | None:
        """The int32 items of an answer; None if they are not seen whole yet."""
        ring = self._data
        start, size = answer.data_at * 4 % len(ring), answer.data_items * 4
        data = bytes(ring[start : start + size])
        if len(data) < size:
            data += bytes(ring[: size - len(data)])
        return data if zlib.crc32(data) == answer.data_check else None


def check_group_name(name: object) -> str:
    if not isinstance(name, str) or not GROUP_NAME.fullmatch(name):
        raise ConfigError(f"group name {name!r}: use 1 to 48 of A-Z a-z 0-9 . _ -")
    return name
