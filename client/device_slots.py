"""Slot tensors on a GPU, and cells beside them for ids that only the device knows.

Both lie in one block: ``arange(N + 1)``, then the cells. So the address of either kind of tensor gives its
*place*, a slot up to N or a cell above it, and handing one out is the same for both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mambapool.client.slot_tensors import SlotTensors
from mambapool.pool import cuda_tensors
from mambapool.pool.cuda import PrimaryContext
from mambapool.pool.cuda_memory import allocate


class DeviceSlotTensors(SlotTensors):
    """:class:`SlotTensors` on a GPU, of memory that torch did not allocate."""

    def __init__(self, slots: int, context: PrimaryContext, cells: int) -> None:
        self.context = context
        self.cells = cells
        values = np.concatenate((np.arange(slots + 1), np.zeros(cells))).astype(np.int64)
        self._memory = allocate(context, values.tobytes())
        block = cuda_tensors.wrap(
            self._memory.address, self._memory.size_bytes, context.device.ordinal, self._memory
        )
        self._keep(slots, block.view(torch.int64))
        self._is_used = bytearray(cells)
        #: Cells that nobody refers to any more, and the fence after which no kernel reads them either.
        self._left: deque[tuple[int, int]] = deque()

    def copy_of(self, slots: Sequence[int] | npt.NDArray[np.integer[Any]]) -> torch.Tensor:
        """A new int64 tensor of these places' values; a copy on the device, so that nothing waits."""
        places = np.asarray(slots, np.int64)
        if not len(places):
            return self._all[:0].clone()
        ends = np.flatnonzero(np.diff(places) != 1) + 1
        pieces = [self._all[run[0] : run[-1] + 1] for run in np.split(places, ends)]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone()

    def address(self, place: int) -> int:
        return self._first + 8 * place

    def take_cells(self, count: int, passed: int) -> int | None:
        """The place of the first of ``count`` cells in a row; None if there is no such row.

        ``passed`` is how far the fences are: cells that were left before come back.
        """
        while self._left and self._left[0][1] <= passed:
            self._is_used[self._left.popleft()[0]] = 0
        start = self._is_used.find(bytes(count))
        if start < 0:
            return None
        self._is_used[start : start + count] = b"\x01" * count
        place = self.slots + 1 + start
        self.make(range(place, place + count))
        return place

    def leave_cell(self, place: int, fence: int) -> None:
        """Nobody has that cell's tensor any more; kernels queued before ``fence`` may still read it."""
        self._left.append((place - self.slots - 1, fence))
