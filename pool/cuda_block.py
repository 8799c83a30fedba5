"""A keeper's block of device memory: plain ``cuMemAlloc``, exported by a CUDA IPC handle.

Outside torch's caching allocator, whose settings (expandable segments, ``cudaMallocAsync``) decide whether a
tensor can be exported at all, and which exports a neighbour's memory along.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Any

from mambapool.pool.cuda import (
    OUT_OF_MEMORY,
    Device,
    PrimaryContext,
    call,
    primary_context,
    visible_devices,
    visible_text,
)
from mambapool.pool.cuda_export import HANDLE_BYTES, CudaExport
from mambapool.pool.errors import CudaError, NotEnoughMemory

_log = logging.getLogger("mambapool.keeper")


class CudaBlock:
    """``size_bytes`` zero bytes on one device, which last as long as this process."""

    def __init__(self, name: str, size_bytes: int, rank: int) -> None:
        """Allocated on the device for ``rank``: the rank-th of the visible ones.

        Raises :class:`NotEnoughMemory`, and :class:`CudaError` when there is no driver or device, or the device
        cannot export memory; both name the devices that are visible.
        """
        devices = visible_devices()
        self.device = _device_for(rank, devices)
        context = primary_context(self.device)
        with context.current():
            self.address = _allocate(name, size_bytes, context, devices)
            call("cuMemsetD8", self.address, 0, size_bytes)
            # The one wait of a keeper: whoever opens the handle finds zeros.
            call("cuCtxSynchronize")
            self.export = self._export(devices)

    def _export(self, devices: list[Device]) -> CudaExport:
        try:
            handle = call("cuIpcGetMemHandle", self.address)
        except CudaError as error:
            mig = (
                "; it is a MIG instance: those share memory only with processes that see the same one"
                if self.device.is_mig
                else ""
            )
            raise CudaError(
                f"{self.device} cannot export memory to other processes ({error}){mig}. CUDA IPC needs Linux and "
                f"a discrete GPU, not Tegra. {visible_text(devices)}",
                call=error.call,
                code=error.code,
            ) from error
        data = ctypes.string_at(handle.getPtr(), HANDLE_BYTES)
        return CudaExport(data, self.device.uuid, *namespaces())


def namespaces() -> tuple[int, int]:
    """The PID and IPC namespace of this process, as inode numbers."""
    return os.stat("/proc/self/ns/pid").st_ino, os.stat("/proc/self/ns/ipc").st_ino


def _device_for(rank: int, devices: list[Device]) -> Device:
    if not devices:
        raise CudaError(f"no GPU to keep rank {rank} on. {visible_text(devices)}")
    if rank >= len(devices) > 1 or (rank and len(devices) == 1):
        _log.warning("rank %d shares a GPU with another rank: %d visible", rank, len(devices))
    return devices[rank % len(devices)]


def _allocate(name: str, size_bytes: int, context: PrimaryContext, devices: list[Device]) -> Any:
    try:
        return call("cuMemAlloc", size_bytes)
    except CudaError as error:
        if error.code != OUT_OF_MEMORY:
            raise
        free, total = call("cuMemGetInfo")
        raise NotEnoughMemory(
            f"{name} needs {size_bytes} bytes on {context.device}, which has {free} of {total} free: ask for fewer "
            f"slots, or start it before what fills the device. {visible_text(devices)}"
        ) from error
