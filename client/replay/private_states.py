"""The same states in private memory: what the pool's memory must hold if nobody else wrote to it.

Kept apart from the mapped states on purpose: rows are found by position instead of by slot, and never is a
byte read from the pool. A grant, a copy or an index that goes wrong on the shared side has nothing to go
wrong with here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mambapool.client.replay.mapped_states import TensorWords
from mambapool.client.replay.recurrence import MULTIPLIER, Words

#: The words of one slot, per tensor an array ``[words]``.
SlotWords = list[Words]


class PrivateStates:
    """The states of the running requests of one scheduler, one row each, in the order they started."""

    def __init__(self, tensors: Sequence[TensorWords]) -> None:
        self._multipliers = [tensor.word(MULTIPLIER[tensor.bits]) for tensor in tensors]
        self._rows: list[Words] = [np.empty((0, tensor.words), tensor.word) for tensor in tensors]

    def start(self, inputs: Sequence[Words]) -> None:
        """Append rows that hold ``inputs``: per tensor an array ``[new rows, words]``."""
        self._rows = [np.concatenate(pair) for pair in zip(self._rows, inputs, strict=True)]

    def advance(self, inputs: Sequence[Words]) -> None:
        """One step of the recurrence for all rows, in place; ``inputs``: per tensor ``[rows, words]``."""
        for rows, multiplier, added in zip(self._rows, self._multipliers, inputs, strict=True):
            rows *= multiplier
            rows += added

    def keep(self, stays: NDArray[np.bool_]) -> None:
        """Drop the rows where ``stays`` is false; the others close up."""
        self._rows = [rows[stays] for rows in self._rows]

    def row(self, position: int) -> SlotWords:
        """A copy of one row."""
        return [rows[position].copy() for rows in self._rows]
