"""One block of host memory per shard: a memfd, allocated whole, that can neither shrink nor grow.

A memfd has no name in any file system: /dev/shm does not limit its size, nobody can unlink it, and the
kernel frees it with the last descriptor and mapping of it, however their processes end. See memfd_create(2).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref

from mambapool.pool.errors import NotEnoughMemory, ProtocolError
from mambapool.pool.memory_limits import check_available

# Without the first a client would die of SIGBUS when the block shrinks under its mapping. With the last,
# nobody can add a seal against writing.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# linux/memfd.h, Linux 6.3; Python 3.11 has no name for it. Hosts with vm.memfd_noexec=2 demand it.
_MFD_NOEXEC_SEAL = 0x0008

# Allocated at once: 100 ms. A handler of a signal has to wait for the end of the call.
_PIECE_BYTES = 256 << 20

_NO_ROOM = {errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def create_block(name: str, size_bytes: int) -> int:
    """A descriptor of ``size_bytes`` zero bytes that are all there; it is not inherited by an exec.

    ``name`` is what ``/proc/PID/maps`` shows. :class:`NotEnoughMemory` when the host or a cgroup has no
    room for it: a block that is allocated as it is used would end in SIGBUS or the OOM killer instead.
    """
    check_available(size_bytes, name)
    fd = _memfd(name)
    try:
        _allocate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise NotEnoughMemory(
                f"{name} needs {size_bytes} bytes, the kernel refused them ({error.strerror}): "
                "ask for fewer slots, free memory, or raise the limit (ulimit -f, vm.overcommit_memory)"
            ) from error
        raise
    return fd


def _allocate(fd: int, size_bytes: int) -> None:
    os.ftruncate(fd, size_bytes)
    for start in range(0, size_bytes, _PIECE_BYTES):
        os.posix_fallocate(fd, start, min(_PIECE_BYTES, size_bytes - start))


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def map_block(fd: int, size_bytes: int) -> mmap.mmap:
    """Map a block that :func:`create_block` made, shared, to read and write.

    ``fd`` stays the caller's. :class:`ProtocolError` when it is anything but such a block of exactly that
    size, :class:`NotEnoughMemory` when this process has no addresses left for it.

    The mapping is ``MADV_DONTFORK``: a forked child does not have it, and dies of SIGSEGV when it touches
    an address in it. The parent is not disturbed.
    """
    _check_block(fd, size_bytes)
    try:
        block = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise NotEnoughMemory(
                f"this process cannot map {size_bytes} bytes: raise its limit (ulimit -v)"
            ) from error
        raise ProtocolError(f"the shared block cannot be mapped: {error.strerror}") from error
    block.madvise(mmap.MADV_DONTFORK)
    _mapped.add(block)
    return block


def _check_block(fd: int, size_bytes: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        found = os.fstat(fd).st_size
    except OSError as error:
        raise ProtocolError(f"descriptor {fd} is not a shared block: {error.strerror}") from error
    if seals & SEALS != SEALS:
        raise ProtocolError(f"the shared block has seals {seals:#x}, at least {SEALS:#x} are needed")
    if found != size_bytes:
        raise ProtocolError(f"the shared block has {found} bytes, its descriptor says {size_bytes}")


_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _keep_from_unmapping() -> None:
    """Let no mmap object of the parent be finalized in this forked child.

    It would unmap addresses that were not inherited, and that by then belong to somebody else: the kernel
    fills such a hole with the next allocation. A reference that nobody drops outlives even the teardown.
    """
    for block in _mapped:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(block))


os.register_at_fork(after_in_child=_keep_from_unmapping)
