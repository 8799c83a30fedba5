"""The allocator's side of leases: locks of other processes, looked at without ever taking them."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Protocol

from mambapool.pool import record_lock
from mambapool.pool.errors import AllocatorUnavailable, ProtocolError
from mambapool.pool.regular_files import open_regular
from mambapool.pool.runtime_dir import RuntimeDir


class WatchedLock:
    """The lock file of another process, opened once and kept open: it can be removed, the lock cannot."""

    def __init__(self, name: bytes, path: Path) -> None:
        """Raises :class:`OSError` when the file cannot be opened, or is no regular file; it is never waited for."""
        self.name = name
        self._path = path
        # For writing too: a lock for writing can only be asked after through such a descriptor.
        self._fd = open_regular(path, os.O_RDWR)

    def is_held(self) -> bool:
        """Whether the process that took it still lives; a stopped one does. Costs half a microsecond."""
        return record_lock.holder(self._fd) is not None

    def close(self) -> None:
        os.close(self._fd)

    def remove(self) -> None:
        """Close and unlink: its process is dead."""
        self.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


class Lock(Protocol):
    """The lock of a process that may have died."""

    name: bytes

    def is_held(self) -> bool:
        """Whether the process that took it still lives."""

    def close(self) -> None:
        """Look no more."""

    def remove(self) -> None:
        """Look no more, and unlink the file: its process is dead."""


class ReleasedLock:
    """The lock of a process that died while nobody looked; its file may be gone."""

    def __init__(self, name: bytes) -> None:
        self.name = name

    def is_held(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def remove(self) -> None:
        pass


class Leases(Protocol):
    """Who looks after leases; in the daemon the :class:`~mambapool.service.watcher.Watcher`."""

    def open(self, name: bytes) -> Lock:
        """Look after this lease from now on; :class:`ProtocolError` unless somebody holds it."""

    def has_ended(self, name: bytes) -> bool | None:
        """Whether the process that had this lease has ended, and not only released it; None: nobody knows."""

    def forget(self, lease: Lock, *, dead: bool) -> None:
        """Its session is gone; ``dead``: nobody is left to remove its file."""


def open_lease(directory: RuntimeDir, name: bytes) -> WatchedLock:
    """The lease of that name; :class:`ProtocolError` when there is none, or nobody holds it."""
    try:
        lease = WatchedLock(name, directory.lease(name))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise AllocatorUnavailable("the allocator has no file descriptor left for another session") from error
        raise ProtocolError(f"no lease {name.hex()} in the runtime directory: {error}") from error
    if not lease.is_held():
        lease.close()
        raise ProtocolError(f"nobody holds the lease {name.hex()}: take its lock before HELLO")
    return lease


def left_over(directory: RuntimeDir) -> list[bytes]:
    """The leases that nobody holds: of processes that died while no allocator ran, or before they said HELLO.

    Or of one that is about to take its lock, which it does within microseconds: look twice before removing any.
    """
    return [name for name in map(_name, directory.leases.iterdir()) if name and not _is_held(directory, name)]


def remove_left_over(directory: RuntimeDir, names: list[bytes]) -> None:
    """Remove those that still nobody holds."""
    for name in names:
        if not _is_held(directory, name):
            directory.lease(name).unlink(missing_ok=True)


def _name(path: Path) -> bytes:
    try:
        return bytes.fromhex(path.name)
    except ValueError:
        return b""


def _is_held(directory: RuntimeDir, name: bytes) -> bool:
    """True also of what is no lease at all."""
    try:
        lease = WatchedLock(name, directory.lease(name))
    except OSError:
        return True
    held = lease.is_held()
    lease.close()
    return held
