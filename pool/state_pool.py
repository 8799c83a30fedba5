"""A shard's memory as torch tensors.

A tensor over shared memory must keep the mapping alive by itself: callers hold views long after the pool
is closed. ``torch.frombuffer`` keeps a reference to the object it was given, but not that object's buffer:
over an ``mmap`` it would let ``mmap.close()`` unmap the memory under the tensor. Over a ``memoryview`` of
the mmap it keeps the view, the view keeps the buffer exported, and the mapping ends with the last tensor,
view of a tensor, or array over one. So nothing here ever unmaps: :meth:`StatePool.close` lets go.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from mambapool.pool.descriptor import ShardDescriptor
from mambapool.pool.errors import ClientClosed, ConfigError, ForkedClient
from mambapool.pool.index_tensors import slot_ids
from mambapool.pool.layout import PlacedTensor
from mambapool.pool.shm import map_block

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# torch splits a copy over its threads, which have to meet at its end. When other processes keep the
# processors busy that takes up to 16 ms, whatever the size: rows of 3 MB then move at 0.2 GB/s instead of 4.
# numpy copies in the calling thread alone, at 1 us per row and half the bandwidth of two cores or more, and
# does not mind. Only rows that take several milliseconds gain more from torch's threads than they can lose.
_PARALLEL_BYTES = 16 << 20


class StatePool:
    """The states of one shard: tensors ``[layers, slots + 1, *shape]`` that every process maps.

    Reading and writing them is ordered by nobody: a slot is its holder's alone. Methods may be called from
    several threads. In a forked child they raise :class:`ForkedClient`, and the tensors are not mapped
    there: touching one ends the child with SIGSEGV (see :func:`~mambapool.pool.shm.map_block`).
    """

    def __init__(self, descriptor: ShardDescriptor, states: Mapping[str, torch.Tensor]) -> None:
        self.descriptor = descriptor
        self._states: Mapping[str, torch.Tensor] | None = MappingProxyType(dict(states))
        self._rows = [self._as_rows(tensor) for tensor in states.values()]
        self._pid = os.getpid()

    @classmethod
    def attach(cls, descriptor: ShardDescriptor, fd: int, device: str | torch.device = "cpu") -> StatePool:
        """Map the block of ``fd``, which stays the caller's to close.

        Errors as :func:`~mambapool.pool.shm.map_block`, and :class:`ConfigError` for a device that the
        backend is not on.
        """
        if torch.device(device).type != "cpu":
            raise ConfigError(f"device {str(device)!r}: pool {descriptor.pool} is in host memory, pass 'cpu'")
        block = memoryview(map_block(fd, descriptor.size_bytes))
        return cls(descriptor, {tensor.name: _tensor(block, tensor) for tensor in descriptor.tensors})

    @property
    def states(self) -> Mapping[str, torch.Tensor]:
        """The tensors by name. They stay usable after :meth:`close`."""
        if os.getpid() != self._pid:
            raise ForkedClient("this pool was mapped before a fork: attach again in the child")
        if (states := self._states) is None:
            raise ClientClosed(f"pool {self.descriptor.pool} is closed: connect again")
        return states

    def _as_rows(self, tensor: torch.Tensor) -> Any:
        """The tensor, or its bytes as a numpy array: both copy row i to row j by ``rows[:, j] = rows[:, i]``."""
        layers, rows = tensor.shape[:2]
        if tensor.nbytes // rows >= _PARALLEL_BYTES:
            return tensor
        return tensor.view(torch.uint8).reshape(layers, rows, -1).numpy()

    def _usable_rows(self) -> list[Any]:
        rows = self._rows  # before the check, so that a close in another thread is seen or does not matter
        _ = self.states
        return rows

    def clear(self, slots: torch.Tensor | Sequence[int]) -> None:
        """Set the states of ``slots`` to zero; naming one twice is no error. Errors as ``slot_ids``."""
        tensors = self._usable_rows()
        ids = slot_ids(slots, size=self.descriptor.slots, distinct=False)
        for rows in tensors:
            for slot in ids:
                rows[:, slot] = 0

    def copy(self, src: torch.Tensor | Sequence[int], dst: torch.Tensor | Sequence[int]) -> None:
        """Copy the state of ``src[i]`` to ``dst[i]``, as if all were read before the first is written.

        One source may go to several destinations. :class:`DuplicateSlot` when a destination is named
        twice, :class:`ValueError` when the lengths differ, else errors as ``slot_ids``.
        """
        tensors = self._usable_rows()
        size = self.descriptor.slots
        from_ids = slot_ids(src, size=size, what="src", distinct=False)
        to_ids = slot_ids(dst, size=size, what="dst")
        if len(from_ids) != len(to_ids):
            raise ValueError(f"src has {len(from_ids)} slots, dst has {len(to_ids)}: pass as many")
        for rows in tensors:
            _copy_rows(rows, from_ids, to_ids)

    def close(self) -> None:
        """Let go of the mapping; it ends with the last tensor over it. May be called again."""
        self._states = None
        self._rows = []

    def __enter__(self) -> StatePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        shard = self.descriptor
        what = "closed" if self._states is None else f"{shard.slots} slots, {shard.size_bytes} bytes"
        return f"<StatePool {shard.pool} rank {shard.rank}: {what}>"


def _tensor(block: memoryview, placed: PlacedTensor) -> torch.Tensor:
    count = math.prod(placed.shape)
    flat = torch.frombuffer(block, dtype=DTYPES[placed.dtype], count=count, offset=placed.offset)
    return flat.as_strided(placed.shape, placed.stride)


def _copy_rows(rows: Any, src: list[int], dst: list[int]) -> None:
    written_at = {slot: step for step, slot in enumerate(dst)}
    sources = [rows[:, slot] for slot in src]
    for step, slot in enumerate(src):
        # Only a row that is written before its turn to be read is kept aside.
        if written_at.get(slot, step) < step:
            sources[step] = _copy_of(sources[step])
    for slot, source in zip(dst, sources, strict=True):
        rows[:, slot] = source


def _copy_of(row: Any) -> Any:
    return row.clone() if isinstance(row, torch.Tensor) else row.copy()
