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

# What has to be let go of: (context, driver call, what it is of). Its put() is safe wherever the collector runs.
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
        let_go(self, context, let_go_by, [handle])


class PinnedMemory:
    """``size_bytes`` of the host's, to which a device can copy without anybody waiting."""

    def __init__(self, context: PrimaryContext, size_bytes: int) -> None:
        with context.current():
            handle = call("cuMemHostAlloc", size_bytes, 0)
        self.address = int(handle)
        #: Its bytes; not to be used any more when this object is gone.
        self.bytes = memoryview((ctypes.c_uint8 * size_bytes).from_address(self.address)).cast("B")
        let_go(self, context, "cuMemFreeHost", [handle])


def allocate(context: PrimaryContext, content: bytes) -> DeviceMemory:
    """New device memory with that content; waits for the device."""
    with context.current():
        address = call("cuMemAlloc", len(content))
        memory = DeviceMemory(context, address, len(content), "cuMemFree")
        call("cuMemcpyHtoD", address, content, len(content))
        # The copy from pageable memory returns when it is staged. Torch's streams do not wait for the null stream, on
        # which it then is.
        call("cuStreamSynchronize", 0)
    return memory


def let_go(owner: object, context: PrimaryContext, name: str, handles: list[Any]) -> None:
    """When ``owner`` is gone, the driver's call of that name takes back what is in ``handles`` then."""
    _start_thread()
    # Not at exit: the driver does that, when the process has ended.
    weakref.finalize(owner, _drop, os.getpid(), context, name, handles).atexit = False


def _drop(pid: int, context: PrimaryContext, name: str, handles: list[Any]) -> None:
    if pid == os.getpid():
        for handle in handles:
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
