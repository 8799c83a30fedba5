"""Opening a keeper's memory in this process: once per shard, whatever the number of sessions."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref

from mambapool.pool.cuda import bindings, call, device_with, primary_context, uuid_text
from mambapool.pool.cuda_block import namespaces
from mambapool.pool.cuda_export import HANDLE_BYTES
from mambapool.pool.cuda_memory import DeviceMemory
from mambapool.pool.descriptor import ShardDescriptor
from mambapool.pool.errors import CudaError

INVALID_CONTEXT = 201

_lock = threading.Lock()
# By the shard's uuid, which is new with each keeper. Never by the handle: its bytes repeat.
_open: weakref.WeakValueDictionary[tuple[int, bytes], DeviceMemory] = weakref.WeakValueDictionary()


def open_shard(descriptor: ShardDescriptor) -> DeviceMemory:
    """The shard's memory, mapped in the primary context of its device; closed with the last tensor over it.

    :class:`CudaError` when the device is not visible here, or the handle cannot be opened: it says why, and
    what a container needs.
    """
    export = descriptor.cuda
    assert export is not None
    device = device_with(export.device, _name(descriptor))
    key = os.getpid(), descriptor.uuid
    with _lock:
        memory = _open.get(key)
        if memory is None:
            context = primary_context(device)
            handle = bindings().CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), export.handle, HANDLE_BYTES)
            lazy = bindings().CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            with context.current():
                try:
                    address = call("cuIpcOpenMemHandle", handle, int(lazy))
                except CudaError as error:
                    raise CudaError(_explain(descriptor, error), call=error.call, code=error.code) from error
            memory = DeviceMemory(context, address, descriptor.size_bytes, "cuIpcCloseMemHandle")
            _open[key] = memory
    return memory


def _name(descriptor: ShardDescriptor) -> str:
    return f"pool {descriptor.pool}, rank {descriptor.rank}"


def _explain(descriptor: ShardDescriptor, error: CudaError) -> str:
    """Why a handle could not be opened, as far as this process can tell."""
    export = descriptor.cuda
    assert export is not None
    reasons = []
    pid_namespace, ipc_namespace = namespaces()
    if pid_namespace != export.pid_namespace or ipc_namespace != export.ipc_namespace:
        differ = [
            name
            for name, ours, theirs in (
                ("PID", pid_namespace, export.pid_namespace),
                ("IPC", ipc_namespace, export.ipc_namespace),
            )
            if ours != theirs
        ]
        reasons.append(
            f"this process is in another {' and '.join(differ)} namespace than the keeper, and CUDA IPC works only "
            "inside one: run both containers with --pid=host --ipc=host, or the second with --pid=container:… "
            "--ipc=container:…"
        )
        if descriptor.pid == os.getpid():
            reasons.append(f"both have pid {descriptor.pid} there, so that CUDA takes them for one process")
    elif descriptor.pid == os.getpid():
        reasons.append("this is the keeper's own process: a handle opens only in another one")
    elif error.code == INVALID_CONTEXT:
        reasons.append(
            "CUDA says so also when both processes have one pid in different namespaces, or run as different users"
        )
    if error.code == 801:  # CUDA_ERROR_NOT_SUPPORTED
        reasons.append("the device has no CUDA IPC: a Tegra, or one without unified addressing")
    return (
        f"{_name(descriptor)} on {uuid_text(export.device)} cannot be mapped ({error}). "
        + "; ".join(reasons or ["the keeper may have ended, or may not share memory with this process"])
        + ". `mambapool doctor` looks at it closely."
    )
