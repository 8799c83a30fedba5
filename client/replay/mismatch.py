"""What a replay reports when the pool's memory is not what it must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mambapool.client.replay.mapped_states import TensorWords
from mambapool.client.replay.recurrence import Words


@dataclass(frozen=True, slots=True)
class Difference:
    """The first element in which a slot is not what it must be.

    ``element`` is its index in the tensor of one slot, ``(layer, *rest)``; the values are the bits that
    lie there, as an unsigned integer.
    """

    tensor: str
    element: tuple[int, ...]
    found: int
    expected: int


def first_difference(
    tensors: Sequence[TensorWords], found: Sequence[Words], expected: Sequence[Words]
) -> Difference | None:
    """Compare the words of one slot, one array ``[words]`` per tensor; None if all are equal."""
    for tensor, found_words, expected_words in zip(tensors, found, expected, strict=True):
        if np.array_equal(found_words, expected_words):
            continue
        found_elements = _elements(tensor, found_words)
        expected_elements = _elements(tensor, expected_words)
        at = int(np.flatnonzero(found_elements != expected_elements)[0])
        element = tuple(int(index) for index in np.unravel_index(at, tensor.shape))
        return Difference(tensor.name, element, int(found_elements[at]), int(expected_elements[at]))
    return None


def describe(request: int, slot: int, holds: str, step: int, difference: Difference) -> str:
    """One line about a slot that is not what it must be; ``holds`` says what the request kept in it."""
    layer, *rest = difference.element
    index = ", ".join(map(str, (layer, slot, *rest)))
    return (
        f"request {request}, slot {slot} ({holds}) after step {step}: {difference.tensor}[{index}] holds "
        f"{difference.found:#x} instead of {difference.expected:#x}"
    )


def _elements(tensor: TensorWords, words: Words) -> np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]:
    return np.ascontiguousarray(words).view(np.uint16 if tensor.element_bytes == 2 else np.uint32)
