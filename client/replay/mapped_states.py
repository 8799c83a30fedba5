"""The states in the pool's memory, which every process maps: where the replay's work is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mambapool.client.replay.recurrence import MULTIPLIER, Words


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

    @property
    def word(self) -> type[np.int32] | type[np.int16]:
        return np.int32 if self.bits == 32 else np.int16


class MappedStates:
    """The mapped tensors ``[layers, N + 1, *shape]`` of a pool in host memory, as integer words.

    Through numpy, because a step is a handful of operations on some ten KiB, and what torch spends on each
    of them before it touches the data is more than twice what all of them take here.
    """

    def __init__(self, states: Mapping[str, torch.Tensor]) -> None:
        self._views = [_word_view(tensor) for tensor in states.values()]
        self.tensors = tuple(
            describe(name, tensor, view) for (name, tensor), view in zip(states.items(), self._views, strict=True)
        )
        self._multipliers = [tensor.word(MULTIPLIER[tensor.bits]) for tensor in self.tensors]

    def start(self, slots: NDArray[np.int64], inputs: Sequence[Words]) -> None:
        """Overwrite ``slots`` by ``inputs``, per tensor an array ``[len(slots), words]``.

        Whatever the slots' last owners left in them is gone.
        """
        for view, words in zip(self._views, inputs, strict=True):
            view[:, slots] = by_layer(words, view)

    def advance(self, slots: NDArray[np.int64], inputs: Sequence[Words]) -> None:
        """One step of the recurrence for ``slots``: gathered, advanced, and written back."""
        for view, multiplier, words in zip(self._views, self._multipliers, inputs, strict=True):
            rows = view.take(slots, axis=1)
            rows *= multiplier
            rows += by_layer(words, view)
            view[:, slots] = rows

    def read(self, slots: NDArray[np.int64]) -> list[Words]:
        """A copy of ``slots``, per tensor an array ``[len(slots), words]``."""
        return [
            view.take(slots, axis=1).transpose(1, 0, 2).reshape(len(slots), tensor.words)
            for view, tensor in zip(self._views, self.tensors, strict=True)
        ]


def _word_view(tensor: torch.Tensor) -> Words:
    words: Words = word_tensor(tensor).numpy()
    return words


def word_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as ``[layers, rows, words per layer]`` of int32, or of int16 where that is no whole."""
    layers, rows = tensor.shape[:2]
    if tensor.element_size() == 4:
        return tensor.view(torch.int32).view(layers, rows, -1)
    view = tensor.view(torch.int16).view(layers, rows, -1)
    return view.view(torch.int32) if view.shape[-1] % 2 == 0 else view


def describe(name: str, tensor: torch.Tensor, view: Words | torch.Tensor) -> TensorWords:
    shape = (tensor.shape[0], *tensor.shape[2:])
    return TensorWords(name, shape, tensor.element_size(), view.shape[0] * view.shape[2], 8 * view.itemsize)


def by_layer(words: Words, view: Words | torch.Tensor) -> Words:
    """``[slots, words]`` as ``[layers, slots, words per layer]``; no copy."""
    return words.reshape(len(words), view.shape[0], view.shape[2]).transpose(1, 0, 2)
