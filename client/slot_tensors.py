"""The tensors that ``alloc`` hands out: one-element views of one ``arange``, made once and kept.

The tensor of slot i is the view at offset i of ``arange(N + 1)`` on the client's device: its value is i,
handing it out costs no kernel and no copy, and ``free`` reads i from its address instead of from the
device. A view takes about 750 bytes, so each is made when it is first needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mambapool.pool.errors import InvalidSlots


class SlotTensors:
    """Slot tensors of one pool on one device. Callers may not write into them."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._keep(slots, torch.arange(slots + 1, dtype=torch.int64, device=device))

    def _keep(self, slots: int, values: torch.Tensor) -> None:
        self.slots = slots
        self._all = values
        self._first = values.data_ptr()
        self._bytes = values.numel() * 8
        #: The tensor of slot i at index i, None until it is made.
        self.cached: list[torch.Tensor | None] = [None] * values.numel()
        #: By ``id()`` of these tensors, which live as long as this does: three times faster than their addresses.
        self.slot_by_id: dict[int, int] = {}
        #: How many are not made yet, that of the reserved row not counted.
        self._missing = values.numel() - 1

    def copy_of(self, slots: Sequence[int] | npt.NDArray[np.integer[Any]]) -> torch.Tensor:
        """A new int64 tensor of these slots, on the device."""
        return torch.from_numpy(np.array(slots, np.int64)).to(self._all.device)

    def get(self, slot: int) -> torch.Tensor:
        """The tensor of one slot: int64, shape ``(1,)``."""
        tensor = self.cached[slot]
        if tensor is None:
            self.make((slot,))
            tensor = self.cached[slot]
            assert tensor is not None
        return tensor

    def make(self, slots: Iterable[int]) -> None:
        """See to it that these slots' tensors are in :attr:`cached`."""
        if not self._missing:
            return
        cached = self.cached
        strided = self._all.as_strided
        for slot in slots:
            if cached[slot] is None:
                tensor = cached[slot] = strided((1,), (1,), slot)
                self.slot_by_id[id(tensor)] = slot
                self._missing -= 1

    def slot_at(self, address: int) -> int:
        """The slot whose element lies at that address, -1 if it is none of these."""
        offset = address - self._first
        return offset >> 3 if 0 <= offset < self._bytes else -1

    def check(self) -> None:
        """Raise if somebody has written into a slot tensor; for the debug mode, it reads the device."""
        expected = torch.arange(self.slots + 1, device=self._all.device)
        wrong = torch.nonzero(self._all[: self.slots + 1] != expected).flatten().tolist()
        if wrong:
            raise InvalidSlots(
                f"somebody wrote into the tensors of slots {wrong[:16]}: alloc() hands out shared views, "
                "clone one before changing it",
                wrong,
            )
