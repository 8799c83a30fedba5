"""What a keeper says about its shard: which pool it belongs to, and where each tensor lies in the block.

A descriptor is data: a msgpack map with string keys, read under limits and type checks, so that a peer
can at worst be refused. The placement on the wire is compared with the one that the geometry gives here.
Two builds that would lay out one state differently find out before either touches the other's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgpack

from mambapool.pool.cuda_export import CudaExport
from mambapool.pool.errors import ConfigError, ProtocolError, VersionMismatch
from mambapool.pool.layout import BlockLayout, Geometry, PlacedTensor, check_slots
from mambapool.pool.runtime_dir import check_pool_name

DESCRIPTOR_VERSION = 1

#: Memory of the host, whose file descriptor comes with the descriptor.
SHM = "shm"
#: Memory of a GPU, which the descriptor's ``cuda`` says how to open.
CUDA_IPC = "cuda-ipc"

#: One message of a SEQPACKET socket. A descriptor of two tensors takes about 300 bytes.
MAX_DESCRIPTOR_BYTES = 64 * 1024

UUID_BYTES = 16
DIGEST_BYTES = 16

# Of a state; bounds the work that a hostile message can ask for.
_MAX_TENSORS = 256

_MAX_TP_SIZE = 1 << 16


@dataclass(frozen=True)
class ShardDescriptor:
    """One rank's shard of a pool.

    ``uuid`` is 16 random bytes, new with each keeper: equal ones mean the same memory. ``pid`` is the
    keeper's, as the keeper sees it; in another PID namespace it says nothing. ``cuda`` is None for memory of the
    host.
    """

    pool: str
    uuid: bytes
    rank: int
    tp_size: int
    slots: int
    geometry: Geometry
    pid: int
    cuda: CudaExport | None = None
    version: int = DESCRIPTOR_VERSION

    def __post_init__(self) -> None:
        check_pool_name(self.pool)
        check_rank(self.rank, self.tp_size)
        check_slots(self.slots)
        _ = self._layout

    @cached_property
    def _layout(self) -> BlockLayout:
        return self.geometry.place(self.slots)

    @property
    def backend(self) -> str:
        return SHM if self.cuda is None else CUDA_IPC

    @property
    def tensors(self) -> tuple[PlacedTensor, ...]:
        return self._layout.tensors

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole block, padding and the reserved rows included."""
        return self._layout.size_bytes

    @property
    def geometry_digest(self) -> bytes:
        return self.geometry.digest

    def pack(self) -> bytes:
        """The message; :class:`ConfigError` when the geometry is too large for one."""
        packed: bytes = msgpack.packb(self._to_wire())
        if len(packed) > MAX_DESCRIPTOR_BYTES or len(self.tensors) > _MAX_TENSORS:
            raise ConfigError(
                f"the descriptor of pool {self.pool} has {len(self.tensors)} tensors in {len(packed)} bytes; "
                f"it can have {_MAX_TENSORS} in {MAX_DESCRIPTOR_BYTES} bytes"
            )
        return packed

    def _to_wire(self) -> dict[str, Any]:
        cuda = {} if self.cuda is None else {"cuda": self.cuda.to_wire()}
        return cuda | {
            "version": self.version,
            "backend": self.backend,
            "pool": self.pool,
            "uuid": self.uuid,
            "rank": self.rank,
            "tp_size": self.tp_size,
            "slots": self.slots,
            "geometry": self.geometry.to_wire(),
            "geometry_digest": self.geometry_digest,
            "size_bytes": self.size_bytes,
            "tensors": [[t.name, t.dtype, list(t.shape), list(t.stride), t.offset] for t in self.tensors],
            "pid": self.pid,
        }


def check_rank(rank: int, tp_size: int) -> None:
    """:class:`ConfigError` unless ``rank`` is one of the ``tp_size`` ranks."""
    if type(tp_size) is not int or not 1 <= tp_size <= _MAX_TP_SIZE:
        raise ConfigError(f"tp_size {tp_size!r}: expected a whole number from 1 to {_MAX_TP_SIZE}")
    if type(rank) is not int or not 0 <= rank < tp_size:
        raise ConfigError(f"rank {rank!r}: expected a whole number from 0 to {tp_size - 1}")


def unpack(data: bytes) -> ShardDescriptor:
    """Read a descriptor.

    :class:`VersionMismatch` when it is of another version, :class:`ProtocolError` that names the field
    when anything else about it is not as :meth:`ShardDescriptor.pack` writes it.
    """
    message = unpack_map(data)
    version = _take(message, "version", int)
    if version != DESCRIPTOR_VERSION:
        raise VersionMismatch(
            f"the keeper describes its shard in version {version}, this process reads "
            f"{DESCRIPTOR_VERSION}: install the same mambapool on both sides"
        )
    if (backend := _take(message, "backend", str)) not in (SHM, CUDA_IPC):
        raise ProtocolError(f"descriptor: backend {backend[:40]!r} is neither {SHM!r} nor {CUDA_IPC!r}")
    descriptor = _build(message)
    _compare(message, descriptor._to_wire())
    return descriptor


def unpack_map(data: bytes) -> dict[str, Any]:
    """Decode one msgpack map with string keys, within a descriptor's limits, or ``ProtocolError``."""
    if len(data) > MAX_DESCRIPTOR_BYTES:
        raise ProtocolError(f"descriptor: {len(data)} bytes, at most {MAX_DESCRIPTOR_BYTES} are read")
    try:
        message = msgpack.unpackb(data, max_array_len=_MAX_TENSORS, max_map_len=32, max_ext_len=0)
    except ValueError as error:
        raise ProtocolError(f"descriptor: not msgpack within its limits: {error}") from error
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise ProtocolError("descriptor: not a map with string keys")
    return message


def _take(message: Mapping[str, Any], field: str, kind: type) -> Any:
    if field not in message:
        raise ProtocolError(f"descriptor: {field} is missing")
    value = message[field]
    if type(value) is not kind:
        raise ProtocolError(f"descriptor: {field} is {type(value).__name__}, expected {kind.__name__}")
    return value


def _build(message: Mapping[str, Any]) -> ShardDescriptor:
    uuid = _take(message, "uuid", bytes)
    if len(uuid) != UUID_BYTES:
        raise ProtocolError(f"descriptor: uuid has {len(uuid)} bytes, expected {UUID_BYTES}")
    pid = _take(message, "pid", int)
    if pid < 0:
        raise ProtocolError(f"descriptor: pid {pid} is negative")
    try:
        geometry = Geometry.from_wire(_take(message, "geometry", list))
    except ConfigError as error:
        raise ProtocolError(f"descriptor: geometry: {error}") from error
    try:
        return ShardDescriptor(
            pool=_take(message, "pool", str),
            uuid=uuid,
            rank=_take(message, "rank", int),
            tp_size=_take(message, "tp_size", int),
            slots=_take(message, "slots", int),
            geometry=geometry,
            pid=pid,
            cuda=CudaExport.from_wire(message.get("cuda")) if message["backend"] == CUDA_IPC else None,
        )
    except ConfigError as error:
        raise ProtocolError(f"descriptor: {error}") from error


def _compare(message: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for field in ("geometry_digest", "size_bytes", "tensors"):
        value = _take(message, field, type(expected[field]))
        # As bytes, because Python takes True and 1.0 for equal to 1.
        if msgpack.packb(value) != msgpack.packb(expected[field]):
            raise ProtocolError(
                f"descriptor: {field} is not what the geometry and {expected['slots']} slots give here"
            )
    if unknown := sorted(message.keys() - expected.keys()):
        raise ProtocolError(f"descriptor: unknown field {unknown[0][:40]!r}")
