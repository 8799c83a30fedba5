"""POSIX record locks: the kernel drops them when their process dies, however it dies.

They work between PID namespaces, are not inherited by a fork, and are kept by a process that is stopped,
stalled or in a debugger. Two traps: a lock does not conflict within one process, and closing any descriptor
of the file, opened by whomever in the process, drops it. See fcntl(2), "Advisory record locking".
"""

from __future__ import annotations

import fcntl
import os
import struct

# struct flock on 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = struct.Struct("hhqqi4x")
_ASKED = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def take(fd: int) -> bool:
    """Take the lock without waiting; False when another process has it."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: fcntl(2) allows both
        return False
    return True


def holder(fd: int) -> int | None:
    """The pid of the other process that has the lock, None if none has; 0: it is in another PID namespace."""
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, _ASKED))
    return None if kind == fcntl.F_UNLCK else int(pid)
