"""Counts, tags and slots: as callers give them, and as messages carry them."""

from __future__ import annotations

import operator
import struct
from typing import SupportsIndex


def whole_number(value: SupportsIndex) -> int:
    """A count of slots: a ``TypeError`` or ``ValueError`` unless it is a whole number of at least 0."""
    count = operator.index(value)
    if count < 0:
        raise ValueError(f"{count} slots: expected 0 or more")
    return count


def tagged(tag: str | None) -> tuple[str, ...]:
    """The last field of a request that has a tag."""
    return () if tag is None else (tag,)


def packed(slots: list[int]) -> int | bytes:
    """Slots as a message carries them."""
    first: int = slots[0]
    return first if len(slots) == 1 else packed_ids(slots)


def packed_ids(slots: list[int]) -> bytes:
    return struct.pack(f"<{len(slots)}i", *slots)  # from a list, three times faster than numpy


def drain(window: list[int]) -> list[int]:
    """Take what is left of a window, next one first; a thread in alloc(1) may take some, too."""
    rest = []
    try:
        while True:
            rest.append(window.pop())
    except IndexError:
        return rest
