"""What a keeper tells about memory of a GPU, so that other processes can open it: data, no call of CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from mambapool.pool.errors import ProtocolError

HANDLE_BYTES = 64
DEVICE_UUID_BYTES = 16


@dataclass(frozen=True, slots=True)
class CudaExport:
    """A CUDA IPC handle, and where it is valid.

    ``device`` is the UUID of the device, or of the MIG instance. The namespaces are inode numbers of
    ``/proc/self/ns``: a handle opens only between processes that share them, so that they explain a failure.
    """

    handle: bytes
    device: bytes
    pid_namespace: int
    ipc_namespace: int

    def to_wire(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_wire(cls, value: object) -> Self:
        """The inverse of :meth:`to_wire`; anything else is a :class:`ProtocolError`."""
        if not isinstance(value, dict) or value.keys() != set(cls.__slots__):
            raise ProtocolError(f"descriptor: cuda must have {', '.join(cls.__slots__)}")
        sizes = {"handle": HANDLE_BYTES, "device": DEVICE_UUID_BYTES}
        for name, size in sizes.items():
            if type(value[name]) is not bytes or len(value[name]) != size:
                raise ProtocolError(f"descriptor: cuda: {name} must have {size} bytes")
        for name in ("pid_namespace", "ipc_namespace"):
            if type(value[name]) is not int or value[name] < 0:
                raise ProtocolError(f"descriptor: cuda: {name} must be a whole number")
        return cls(**value)
