"""The states in a GPU's memory, as the replay's work sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mambapool.client.replay.mapped_states import MappedStates, by_layer, describe, word_tensor
from mambapool.client.replay.recurrence import MULTIPLIER, Words
from mambapool.pool import cuda_tensors


class DeviceStates(MappedStates):
    """:class:`MappedStates` where the work is queued on the current stream; reading waits for it."""

    def __init__(self, states: Mapping[str, torch.Tensor]) -> None:
        self._on_device = [word_tensor(tensor) for tensor in states.values()]
        self.tensors = tuple(
            describe(name, tensor, view)
            for (name, tensor), view in zip(states.items(), self._on_device, strict=True)
        )
        self._factors = [int(tensor.word(MULTIPLIER[tensor.bits])) for tensor in self.tensors]

    def start(self, slots: NDArray[np.int64], inputs: Sequence[Words]) -> None:
        for view, words in zip(self._on_device, inputs, strict=True):
            view.index_copy_(1, _moved(slots, view), _moved(by_layer(words, view), view))

    def advance(self, slots: NDArray[np.int64], inputs: Sequence[Words]) -> None:
        for view, factor, words in zip(self._on_device, self._factors, inputs, strict=True):
            index = _moved(slots, view)
            rows = view.index_select(1, index).mul_(factor).add_(_moved(by_layer(words, view), view))
            view.index_copy_(1, index, rows)

    def read(self, slots: NDArray[np.int64]) -> list[Words]:
        return [
            view.index_select(1, _moved(slots, view)).transpose(0, 1).reshape(len(slots), -1).cpu().numpy()
            for view in self._on_device
        ]


def map_states(states: Mapping[str, torch.Tensor]) -> MappedStates:
    """The states of a pool, wherever its memory is."""
    on_gpu = any(cuda_tensors.is_on_device(tensor) for tensor in states.values())
    return DeviceStates(states) if on_gpu else MappedStates(states)


def _moved(values: Words | NDArray[np.int64], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)
