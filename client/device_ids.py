"""Ids that only the device knows: of tensors that are no slot tensors, such as an engine's clones of them.

Nothing waits for such an id. A free copies it on the device into a cell, and from there to pinned memory behind an
event. The cell's tensor can be handed out again before anybody here knows the id; the checks are made when the id
comes. A *place* is a slot, or a cell that stands for one (:mod:`mambapool.client.device_slots`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mambapool.client.device_slots import DeviceSlotTensors
from mambapool.client.fences import Fences
from mambapool.client.record import HELD, LEAVING
from mambapool.pool import cuda_tensors
from mambapool.pool.cuda import bindings, call
from mambapool.pool.cuda_events import Events
from mambapool.pool.cuda_memory import PinnedMemory

#: Cells that were left are fenced together: a fence each would cost more than the cell.
_LEFT_TOGETHER = 64


@dataclass(slots=True)
class _Copying:
    place: int
    count: int
    event: Any
    source: torch.Tensor  # not to be given to anybody else by torch before the copy has been made
    marks: bytes  # what the caller had at that moment
    freed: int  # how much of the log of frees was before it


Arrived = tuple[int, int, _Copying]


class DeviceIds:
    """Which cell stands for which slot. The caller of its methods locks."""

    def __init__(self, tensors: DeviceSlotTensors, marks: bytearray, fences: Fences) -> None:
        self._tensors = tensors
        self._slots = tensors.slots
        self._marks = marks
        self._fences = fences
        self._pinned = PinnedMemory(fences.context, 8 * tensors.cells)
        self._values = np.frombuffer(self._pinned.bytes, np.int64)
        self._copying: deque[_Copying] = deque()
        self._events = Events(fences.context)
        self._left: list[int] = []
        #: Cell → slot, once it is known.
        self._slot_of_cell: dict[int, int] = {}
        #: Slot → the cell that stands for it; a slot that is not here stands for itself.
        self._cell_of_slot: dict[int, int] = {}
        #: Ids that are not known yet.
        self.unknown = 0
        #: Places that were freed while there were any.
        self._freed: list[int] = []

    def copy(self, source: torch.Tensor) -> list[int] | None:
        """Queue copies of these ids, an int64 tensor on the device; the cells. None: no cell is left.

        On the caller's current stream, so that they are as they are at this moment of its work.
        """
        count = source.numel()
        self._fence_left()
        place = self._tensors.take_cells(count, self._fences.passed)
        if place is None:
            return None
        stream = bindings().CUstream(cuda_tensors.current_stream(self._fences.context.device.ordinal))
        cell = self._tensors.address(place)
        pinned = self._pinned.address + 8 * (place - self._slots - 1)
        with self._fences.context.current():
            event = self._events.take()
            call("cuMemcpyDtoDAsync", cell, source.data_ptr(), 8 * count, stream)
            call("cuMemcpyDtoHAsync", pinned, cell, 8 * count, stream)
            call("cuEventRecord", event, stream)
        self._copying.append(_Copying(place, count, event, source, bytes(self._marks), len(self._freed)))
        self.unknown += count
        return list(range(place, place + count))

    def note_freed(self, places: list[int]) -> None:
        """These were freed by ids that are known."""
        if self.unknown:
            self._freed += places
        else:
            self._freed.clear()

    def arrived(self) -> Iterator[Arrived]:
        """The cells whose ids have come, in the order in which they were freed, and the ids; not yet checked."""
        while self._copying and self._fences.is_event_over(self._copying[0].event):
            copied = self._copying.popleft()
            self._events.give_back(copied.event)
            first = copied.place - self._slots - 1
            self.unknown -= copied.count
            for place, value in enumerate(self._values[first : first + copied.count].tolist(), copied.place):
                yield place, value, copied

    def was_held(self, slot: int, copied: _Copying) -> bool:
        """Whether the caller had the slot when it freed it by this id, and has not freed it again since.

        That it has it now would not do: it may have been handed out after that free.
        """
        place = self.place_of(slot)
        return copied.marks[place] == HELD and place not in self._freed[copied.freed :]

    def stand_for(self, place: int, slot: int) -> None:
        """That cell stands for the slot from now on; what stood for it before does not."""
        before = self.place_of(slot)
        self._marks[before] = 0
        if before != slot:
            self.leave(before)
        self._slot_of_cell[place] = slot
        self._cell_of_slot[slot] = place

    def place_of(self, slot: int) -> int:
        """What stands for a slot: a cell, or itself."""
        return self._cell_of_slot.get(slot, slot)

    def slot_of(self, place: int) -> int | None:
        """The slot that a place stands for; None while it is not known."""
        return place if place <= self._slots else self._slot_of_cell.get(place)

    def plain(self, place: int) -> int:
        """The slot of a place, which stands for itself again; its id has to be known."""
        slot = self.slot_of(place)
        assert slot is not None
        if slot != place:
            self._marks[slot] = self._marks[place]
            self.leave(place)
        return slot

    def leave(self, cell: int) -> None:
        """Nobody has this cell any more."""
        self._marks[cell] = 0
        slot = self._slot_of_cell.pop(cell, None)
        if slot is not None and self._cell_of_slot.get(slot) == cell:
            del self._cell_of_slot[slot]
        self._left.append(cell)

    def held(self) -> set[int]:
        """Every slot that the caller has, or has freed by an id that is not known yet."""
        places = [place for place, mark in enumerate(self._marks) if mark in (HELD, LEAVING)]
        return {slot for place in places if (slot := self.slot_of(place)) is not None}

    def forget(self) -> None:
        """Nothing is held, and no id is waited for any more."""
        for copied in self._copying:
            self._left += range(copied.place, copied.place + copied.count)
        self._copying.clear()
        self._freed.clear()
        self.unknown = 0
        self._left += self._slot_of_cell
        self._slot_of_cell.clear()
        self._cell_of_slot.clear()

    def _fence_left(self) -> None:
        if len(self._left) >= _LEFT_TOGETHER:
            fence = self._fences.issue()
            for cell in self._left:
                self._tensors.leave_cell(cell, fence)
            self._left.clear()
