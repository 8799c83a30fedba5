"""The states in the pool's memory, which every process maps: where the replay's work is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mambapool.client.replay.recurrence import MULTIPLIER, Words, weights


@dataclass(frozen=True, slots=True)
class TensorWords:
    """How one tensor of a state reads as words.

    ``shape`` is that of one slot, ``(layers, *shape)``, in elements of ``element_bytes``; a slot has
    ``words`` words of ``bits`` bits, layer after layer.
    """

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    words: int
    bits: int


class MappedStates:
    """The mapped tensors ``[layers, N + 1, *shape]`` of a pool, read and written as integer words.

    Works on any device; a step is four kernels per tensor, whatever the number of requests.
    """

    def __init__(self, states: Mapping[str, torch.Tensor]) -> None:
        self._views = [_word_view(tensor) for tensor in states.values()]
        self.tensors = tuple(
            _describe(name, tensor, view) for (name, tensor), view in zip(states.items(), self._views, strict=True)
        )
        self._device = self._views[0].device
        self._weights = [
            torch.from_numpy(weights(tensor.words, tensor.bits)).to(self._device).view(view.shape[0], 1, -1)
            for tensor, view in zip(self.tensors, self._views, strict=True)
        ]

    def start(self, slots: torch.Tensor, drives: NDArray[np.int32]) -> None:
        """Overwrite the rows of ``slots`` (int64, one dimension) by the input of ``drives``, one per slot.

        Whatever the slots' last owners left in them is gone.
        """
        for view, inputs in zip(self._views, self._inputs(drives), strict=True):
            view.index_copy_(1, slots, inputs)

    def advance(self, slots: torch.Tensor, drives: NDArray[np.int32]) -> None:
        """One step of the recurrence for the rows of ``slots``, in place."""
        for tensor, view, inputs in zip(self.tensors, self._views, self._inputs(drives), strict=True):
            rows = view.index_select(1, slots)
            torch.add(inputs, rows, alpha=MULTIPLIER[tensor.bits], out=rows)
            view.index_copy_(1, slots, rows)

    def read(self, slots: torch.Tensor) -> list[Words]:
        """A copy of the rows of ``slots``, per tensor an array ``[len(slots), words]``."""
        return [
            view.index_select(1, slots).transpose(0, 1).reshape(len(slots), -1).cpu().numpy()
            for view in self._views
        ]

    def _inputs(self, drives: NDArray[np.int32]) -> list[torch.Tensor]:
        """The inputs of one step, per tensor ``[layers, len(drives), words per layer]``."""
        column = torch.from_numpy(drives).to(self._device).view(1, -1, 1)
        return [column.to(weight.dtype) * weight for weight in self._weights]


def _word_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as ``[layers, rows, words per layer]`` of int32, or of int16 where that is no whole."""
    layers, rows = tensor.shape[:2]
    if tensor.element_size() == 4:
        return tensor.view(torch.int32).view(layers, rows, -1)
    halves = tensor.view(torch.int16).view(layers, rows, -1)
    return halves.view(torch.int32) if halves.shape[-1] % 2 == 0 else halves


def _describe(name: str, tensor: torch.Tensor, view: torch.Tensor) -> TensorWords:
    shape = (tensor.shape[0], *tensor.shape[2:])
    bits = 8 * view.element_size()
    return TensorWords(name, shape, tensor.element_size(), view.shape[0] * view.shape[2], bits)
