"""Device memory that this process has, let go of when nothing uses it any more, by a thread of its own.

The driver may wait for the device when memory is freed or a mapping closed, which must hold up neither the
thread that dropped the last tensor, in the middle of anything, nor the one that looks after sessions.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import weakref
from typing import Any

from mambapool.pool.cuda import PrimaryContext, call, disturbing_no_capture
from mambapool.pool.errors import CudaError

# What has to be let go of: (context, driver call, address). Its put() is safe wherever the collector runs.
_dropped: queue.SimpleQueue[tuple[PrimaryContext, str, Any]] = queue.SimpleQueue()
_thread_lock = threading.Lock()
_thread_pid = 0


class DeviceMemory:
    """``size_bytes`` at ``address`` on a device, for as long as this object is referred to."""

    def __init__(self, context: PrimaryContext, handle: Any, size_bytes: int, let_go_by: str) -> None:
        """``handle`` is what the driver returned; ``let_go_by`` names its call that takes it back."""
        self.address = int(handle)
        self.size_bytes = size_bytes
        self.ordinal = context.device.ordinal
        _start_thread()
        # Not at exit: the driver does that, when the process has ended.
        weakref.finalize(self, _drop, os.getpid(), context, let_go_by, handle).atexit = False


def allocate(context: PrimaryContext, content: bytes) -> DeviceMemory:
    """New device memory with that content; waits for the device."""
    with context.current():
        address = call("cuMemAlloc", len(content))
        memory = DeviceMemory(context, address, len(content), "cuMemFree")
        call("cuMemcpyHtoD", address, content, len(content))
    return memory


def allocate_pinned(context: PrimaryContext, size_bytes: int) -> memoryview:
    """Memory of the host that a device can copy to without anybody waiting; it stays until the process ends."""
    with context.current():
        address = call("cuMemHostAlloc", size_bytes, 0)
    block = (ctypes.c_uint8 * size_bytes).from_address(int(address))
    return memoryview(block).cast("B")


def address_of(block: memoryview) -> int:
    return ctypes.addressof(ctypes.c_uint8.from_buffer(block))


def _drop(pid: int, context: PrimaryContext, name: str, handle: Any) -> None:
    if pid == os.getpid():
        _dropped.put((context, name, handle))


def _start_thread() -> None:
    global _thread_pid
    with _thread_lock:
        if _thread_pid != os.getpid():
            threading.Thread(target=_let_go, name="mambapool-cuda", daemon=True).start()
            _thread_pid = os.getpid()


def _let_go() -> None:
    while True:
        context, name, handle = _dropped.get()
        # A context that an illegal access ended lets go of everything by itself.
        with contextlib.suppress(CudaError), disturbing_no_capture(), context.current():
            call(name, handle)
        del context, handle
