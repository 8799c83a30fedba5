"""SGLang's slot allocator, in process, on torch: own code with the algorithm of its ``MambaSlotAllocator`` (0.5.23).

The free list is a tensor: ``alloc`` slices it, ``free`` concatenates, so that each free copies the whole list. A group
is split into one-element tensors at its begin. No holders, no checks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


class InProcessAllocator:
    """One engine's own list of ``size`` slots."""

    def __init__(self, size: int) -> None:
        self.free_slots = torch.arange(1, size + 1, dtype=torch.int64)
        self._group: Iterator[torch.Tensor] | None = None

    def available_size(self) -> int:
        return len(self.free_slots)

    def alloc_group_begin(self, num_reqs: int) -> None:
        self._group = None
        if num_reqs > 0:
            slots = self._take(num_reqs)
            if slots is not None:
                self._group = iter(torch.split(slots, 1))

    def alloc_group_end(self) -> None:
        if self._group is not None:
            rest = list(self._group)
            if rest:
                self.free(torch.cat(rest))
        self._group = None

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if self._group is not None and need_size == 1:
            slot = next(self._group, None)
            if slot is not None:
                return slot
        return self._take(need_size)

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        self.free_slots = torch.cat((self.free_slots, free_index))

    def _take(self, need_size: int) -> torch.Tensor | None:
        if need_size > len(self.free_slots):
            return None
        taken = self.free_slots[:need_size]
        self.free_slots = self.free_slots[need_size:]
        return taken
