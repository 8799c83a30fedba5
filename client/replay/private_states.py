"""The same states in private memory: what the pool's memory must hold if nobody else wrote to it.

Kept apart from the mapped states on purpose: other memory, another library (numpy, where those use
torch), rows found by position instead of by slot, and never a byte read from the pool. A grant, a copy or
an index that goes wrong on the shared side has nothing to go wrong with here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mambapool.client.replay.mapped_states import TensorWords
from mambapool.client.replay.recurrence import MULTIPLIER, Words, weights

#: The words of one slot, per tensor an array ``[words]``.
SlotWords = list[Words]


class PrivateStates:
    """The states of the running requests of one scheduler, one row each, in the order they started."""

    def __init__(self, tensors: Sequence[TensorWords]) -> None:
        self._weights = [weights(tensor.words, tensor.bits) for tensor in tensors]
        self._multipliers = [weight.dtype.type(MULTIPLIER[8 * weight.itemsize]) for weight in self._weights]
        self._rows = [np.empty((0, weight.size), weight.dtype) for weight in self._weights]

    def inputs(self, drives: NDArray[np.int32]) -> list[Words]:
        """The inputs of one step, per tensor an array ``[len(drives), words]``."""
        return [drives.astype(weight.dtype)[:, np.newaxis] * weight for weight in self._weights]

    def start(self, drives: NDArray[np.int32]) -> None:
        """Append rows that hold the input of ``drives``, one per row."""
        self._rows = [
            np.concatenate((rows, inputs)) for rows, inputs in zip(self._rows, self.inputs(drives), strict=True)
        ]

    def advance(self, drives: NDArray[np.int32]) -> None:
        """One step of the recurrence for all rows, in place; one drive per row."""
        for rows, multiplier, inputs in zip(self._rows, self._multipliers, self.inputs(drives), strict=True):
            rows *= multiplier
            rows += inputs

    def keep(self, stays: NDArray[np.bool_]) -> None:
        """Drop the rows where ``stays`` is false; the others close up."""
        self._rows = [rows[stays] for rows in self._rows]

    def row(self, position: int) -> SlotWords:
        """A copy of one row."""
        return [rows[position].copy() for rows in self._rows]
