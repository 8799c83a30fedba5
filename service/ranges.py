"""Slots in few words."""

from __future__ import annotations

from collections.abc import Iterable


def ranges(slots: Iterable[int]) -> str:
    """``1-4, 7``, in the order in which they come."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
