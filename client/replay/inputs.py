"""What a step of the recurrence adds to every word of a state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mambapool.client.replay.mapped_states import TensorWords
from mambapool.client.replay.recurrence import Words, weights


class Inputs:
    """The inputs ``drive · weight``, computed once per step for the mapped and for the private states."""

    def __init__(self, tensors: Sequence[TensorWords]) -> None:
        self._weights = [weights(tensor.words, tensor.bits) for tensor in tensors]

    def of(self, drives: NDArray[np.int32]) -> list[Words]:
        """Per tensor an array ``[len(drives), words]``, not to be written to."""
        return [drives.astype(weight.dtype)[:, np.newaxis] * weight for weight in self._weights]
