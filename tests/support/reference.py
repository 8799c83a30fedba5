"""SGLang's slot allocator as a plain model: a list, and nothing else. Own code over its published meaning."""

from __future__ import annotations


class ReferenceAllocator:
    """What one engine alone expects of its allocator: ids from the head, back at the tail.

    Differs from SGLang's where this project goes beyond: a second begin returns the first window's rest, and
    ``clear`` ends the window.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free_slots = list(range(1, size + 1))
        self.window: list[int] = []

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc(self, count: int) -> list[int] | None:
        if count == 1 and self.window:
            return [self.window.pop(0)]
        return self._take(count)

    def alloc_group_begin(self, count: int) -> None:
        self.alloc_group_end()
        self.window = self._take(count) or []

    def alloc_group_end(self) -> None:
        self.free_slots += self.window
        self.window = []

    def free(self, slots: list[int]) -> None:
        self.free_slots += slots

    def clear(self) -> None:
        self.window = []
        self.free_slots = list(range(1, self.size + 1))

    def _take(self, count: int) -> list[int] | None:
        if count > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:count], self.free_slots[count:]
        return taken
