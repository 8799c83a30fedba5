"""The calls of a group's ranks as words: equal calls are equal words, and a word can be read back as text.

A word is ``kind << 56 | count << 32 | argument``: the argument is a slot, a flag, or a digest of several ids.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final

# Kinds of a call.
ALLOC: Final = 1
BEGIN: Final = 2
END: Final = 3
FREE: Final = 4
CLEAR: Final = 5
AVAILABLE_SIZE: Final = 6
FREE_SLOTS: Final = 7
TRANSFER: Final = 8
ACCEPT: Final = 9


#: Argument of a free of ids that only the device knows: the word says how many.
UNKNOWN: Final = 0xFFFFFFFF


def call_word(kind: int, count: int = 0, argument: int = 0) -> int:
    """A call as one word. ``argument``: a slot, a flag, or a digest, of 32 bits."""
    return kind << 56 | (count & 0xFFFFFF) << 32 | argument & 0xFFFFFFFF


def digest(data: bytes) -> int:
    """32 bits that stand for the ids of a call."""
    return zlib.crc32(data)


_TEXTS: Final[dict[int, Callable[[int, int], str]]] = {
    ALLOC: lambda count, waits: f"alloc({count}{', timeout=…' if waits else ''})",
    BEGIN: lambda count, partial: f"alloc_group_begin({count}{', partial=True' if partial else ''})",
    END: lambda _count, _argument: "alloc_group_end()",
    FREE: lambda count, which: f"free({_slots(count, which)})",
    CLEAR: lambda _count, _argument: "clear()",
    AVAILABLE_SIZE: lambda _count, _argument: "available_size()",
    FREE_SLOTS: lambda _count, _argument: "free_slots",
    TRANSFER: lambda count, which: f"transfer({count} slots, digest {which:08x})",
    ACCEPT: lambda _count, _argument: "accept()",
}


def call_text(word: int) -> str:
    """What a call word says, for people."""
    text = _TEXTS.get(word >> 56)
    return text(word >> 32 & 0xFFFFFF, word & 0xFFFFFFFF) if text else f"call {word:#x}"


def _slots(count: int, which: int) -> str:
    if which == UNKNOWN:
        return f"{count} slots that the device knows"
    return f"slot {which}" if count == 1 else f"{count} slots, digest {which:08x}"
