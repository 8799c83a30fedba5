"""The geometry of a state, and how the tensors of N states lie in one block of memory.

A state is a list of named tensors. In a pool of N slots each of them is ``[layers, N + 1, *shape]``:
layers first, then the slot, row 0 reserved for padded batch entries. That is the order of SGLang's
``MambaPool``; layer counts may differ per name. All tensors of a shard lie in one block, each aligned
to 256 bytes (the alignment of ``cudaMalloc``, and enough for any vector load).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgpack

from mambapool.pool.digest import digest16
from mambapool.pool.errors import ConfigError

ALIGNMENT_BYTES = 256

#: Where the block can be: memory of the host, or of a GPU.
DEVICES = ("cpu", "cuda")

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

#: Ranks of one pool: eight nodes of eight devices are 64; the bound only keeps mistakes out.
MAX_TP_SIZE = 1024

#: Ids travel and are stored as int32.
MAX_SLOTS = 2**31 - 2

#: What a memory can be addressed with at all; keeps sums far from overflow in every language.
MAX_BLOCK_BYTES = 2**56

#: Of a tensor without layers and slot; numpy before 2.0 takes 32 dimensions in all.
MAX_DIMENSIONS = 16

_NAME = re.compile(r"[a-z][a-z0-9_.]{0,31}")
_SPEC = re.compile(r"(?P<name>[^=]*)=(?P<dtype>[^:]*):(?P<dims>.*)")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One named tensor of a state: ``[layers, slots + 1, *shape]`` of ``dtype``."""

    name: str
    dtype: str
    layers: int
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(f"tensor name {self.name!r}: use 1 to 32 of a-z 0-9 _ . after a letter")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"tensor {self.name}: dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        # A list would do, but equal geometries would then compare unequal.
        if not isinstance(self.shape, tuple) or not 1 <= len(self.shape) <= MAX_DIMENSIONS:
            raise ConfigError(f"tensor {self.name}: needs 1 to {MAX_DIMENSIONS} dimensions after the layers")
        for size in (self.layers, *self.shape):
            if type(size) is not int or not 1 <= size <= MAX_BLOCK_BYTES:
                raise ConfigError(
                    f"tensor {self.name}: size {size!r} is not a whole number from 1 to {MAX_BLOCK_BYTES}"
                )

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """Read ``NAME=DTYPE:LxDxD…``, as ``--state`` takes it; L is the number of layers."""
        match = _SPEC.fullmatch(text)
        sizes = match["dims"].split("x") if match else []
        if match is None or len(sizes) < 2 or not all(re.fullmatch("[0-9]{1,18}", size) for size in sizes):
            raise ConfigError(
                f"--state {text!r}: expected NAME=DTYPE:LAYERSxDIMxDIM…, for example conv=bfloat16:4x96x3"
            )
        layers, *shape = map(int, sizes)
        return cls(match["name"], match["dtype"], layers, tuple(shape))

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot's rows of this tensor over all layers."""
        return self.layers * math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name}={self.dtype}:{'x'.join(map(str, (self.layers, *self.shape)))}"


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor at its place in the block: strides count elements, the offset counts bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where every tensor of a shard lies; ``size_bytes`` is what the block takes, padding included."""

    slots: int
    tensors: tuple[PlacedTensor, ...]
    size_bytes: int


@dataclass(frozen=True)
class Geometry:
    """What one state of one rank consists of. Equal geometries have equal ``digest``."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ConfigError("a state needs at least one tensor")
        seen = set()
        for tensor in self.tensors:
            if tensor.name in seen:
                raise ConfigError(f"tensor {tensor.name} is named twice")
            seen.add(tensor.name)

    @cached_property
    def bytes_per_slot(self) -> int:
        """Bytes of one state, without padding and without the reserved row."""
        return sum(tensor.bytes_per_slot for tensor in self.tensors)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal exactly when the geometries are: BLAKE2b over the packed specs."""
        return digest16(msgpack.packb(self.to_wire()))

    def place(self, slots: int) -> BlockLayout:
        """Lay out the tensors for ``slots`` usable slots, which makes ``slots + 1`` rows."""
        check_slots(slots)
        if self._block_bytes(slots) > MAX_BLOCK_BYTES:
            raise ConfigError(f"{slots} slots of {self.bytes_per_slot} bytes are more than can be addressed")
        placed = []
        end = 0
        for spec in self.tensors:
            offset = _align(end)
            shape = (spec.layers, slots + 1, *spec.shape)
            tensor = PlacedTensor(spec.name, spec.dtype, shape, _contiguous(shape), offset)
            placed.append(tensor)
            end = offset + tensor.size_bytes
        return BlockLayout(slots, tuple(placed), _align(end))

    def slots_that_fit(self, memory_bytes: int) -> int:
        """The most usable slots whose block, reserved row and padding included, fits; 0 if none does."""
        memory_bytes = min(memory_bytes, MAX_BLOCK_BYTES)
        low, high = 0, min(memory_bytes // self.bytes_per_slot, MAX_SLOTS)
        while low < high:
            middle = (low + high + 1) // 2
            if self._block_bytes(middle) <= memory_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    def _block_bytes(self, slots: int) -> int:
        """What :meth:`place` takes: every tensor begins, and the block ends, at a multiple of 256."""
        return sum(_align((slots + 1) * tensor.bytes_per_slot) for tensor in self.tensors)

    def to_wire(self) -> list[Any]:
        return [[t.name, t.dtype, t.layers, list(t.shape)] for t in self.tensors]

    @classmethod
    def from_wire(cls, value: Sequence[Any]) -> Geometry:
        """The inverse of :meth:`to_wire`; a malformed value is a ``ConfigError``."""
        if not _is_array(value) or not all(
            _is_array(item) and len(item) == 4 and _is_array(item[3]) for item in value
        ):
            raise ConfigError("not the geometry of a state: expected [[name, dtype, layers, [dim, …]], …]")
        return cls(tuple(TensorSpec(name, dtype, layers, tuple(dims)) for name, dtype, layers, dims in value))


def check_slots(slots: int) -> None:
    if type(slots) is not int or not 1 <= slots <= MAX_SLOTS:
        raise ConfigError(f"slots {slots!r}: expected a whole number from 1 to {MAX_SLOTS}")


def _is_array(value: object) -> bool:
    return isinstance(value, list | tuple)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
