"""A shard's states on a GPU: torch tensors over the keeper's memory, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch

from mambapool.pool import cuda_tensors
from mambapool.pool.cuda_attach import open_shard
from mambapool.pool.descriptor import ShardDescriptor
from mambapool.pool.index_tensors import slot_ids
from mambapool.pool.layout import PlacedTensor
from mambapool.pool.state_pool import DTYPES, StatePool


class CudaStatePool(StatePool):
    """:class:`StatePool` on a GPU. What it does is queued on the current stream, and nothing waits for it.

    Ids that are on the device are used as they are: reading them to check them would wait for the device.
    """

    ordinal: int

    @classmethod
    def open(cls, descriptor: ShardDescriptor) -> Self:
        """Errors as :func:`~mambapool.pool.cuda_attach.open_shard`."""
        memory = open_shard(descriptor)
        block = cuda_tensors.wrap(memory.address, memory.size_bytes, memory.ordinal, memory)
        pool = cls(descriptor, {tensor.name: _tensor(block, tensor) for tensor in descriptor.tensors})
        pool.ordinal = memory.ordinal
        return pool

    def clear(self, slots: torch.Tensor | Sequence[int]) -> None:
        """Set the states of ``slots`` to zero; naming one twice is no error."""
        for tensor in self._usable_rows():
            tensor.index_fill_(1, self._index(slots, "slots", tensor), 0)

    def copy(self, src: torch.Tensor | Sequence[int], dst: torch.Tensor | Sequence[int]) -> None:
        """Copy the state of ``src[i]`` to ``dst[i]``, as if all were read before the first is written."""
        if len(src) != len(dst):
            raise ValueError(f"src has {len(src)} slots, dst has {len(dst)}: pass as many")
        for tensor in self._usable_rows():
            read = tensor.index_select(1, self._index(src, "src", tensor, distinct=False))
            tensor.index_copy_(1, self._index(dst, "dst", tensor, distinct=True), read)

    def _index(
        self, slots: torch.Tensor | Sequence[int], what: str, like: torch.Tensor, *, distinct: bool = False
    ) -> torch.Tensor:
        if isinstance(slots, torch.Tensor) and cuda_tensors.is_on_device(slots):
            return slots
        ids = slot_ids(slots, size=self.descriptor.slots, what=what, distinct=distinct)
        return torch.tensor(ids, dtype=torch.int64, device=like.device)

    def _as_rows(self, tensor: torch.Tensor) -> Any:
        return tensor


def _tensor(block: torch.Tensor, placed: PlacedTensor) -> torch.Tensor:
    piece = block[placed.offset : placed.offset + placed.size_bytes]
    return piece.view(DTYPES[placed.dtype]).view(placed.shape)
