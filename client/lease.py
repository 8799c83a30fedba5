"""A session's lease: what proves to the allocator that its process lives, and that it has died.

The proof is a record lock on a file of the session's own, taken before HELLO. The hint, so that a death is
noticed within milliseconds, is a connection that stays open: the kernel closes it with the process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket

from mambapool.pool import record_lock
from mambapool.pool.errors import AllocatorUnavailable, RuntimeDirError
from mambapool.pool.runtime_dir import RuntimeDir, check_socket_path

LEASE_BYTES = 16


class Lease:
    """Held from construction until :meth:`close`, or until the process ends.

    The name is random and never used again. The file is opened once and never by anybody else in this
    process: closing any descriptor of it would drop the lock.
    """

    def __init__(self, directory: RuntimeDir) -> None:
        self.name = secrets.token_bytes(LEASE_BYTES)
        self._directory = directory
        self._path = directory.lease(self.name)
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RuntimeDirError(f"cannot make the lease {self._path}: {error.strerror}") from error
        self._connection: socket.socket | None = None
        if not record_lock.take(self._fd):
            self.close()
            raise RuntimeDirError(f"cannot lock the lease {self._path}: another process has it")

    @property
    def connected(self) -> bool:
        """Whether there is a connection, and an allocator at its other end."""
        if self._connection is None:
            return False
        try:
            # Nothing is ever said there: what can be read is its end.
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def connect(self) -> None:
        """Open the connection whose end tells the allocator to look at the lock; again after a restart of it."""
        self.disconnect()
        path = check_socket_path(self._directory.lease_socket)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # So that a connect fails at once when too many others wait to be accepted: unix(7), EAGAIN.
            connection.setblocking(False)
            connection.connect(path)
            connection.send(self.name)
        except OSError as error:
            connection.close()
            raise AllocatorUnavailable(f"nobody watches leases at {path}: {error.strerror or error}") from error
        self._connection = connection

    def close(self) -> None:
        """Give the lease up: the file first, so that a name that can be found is a lease that is held."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors. In a forked child that leaves the parent's lease as it is."""
        self.disconnect()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def disconnect(self) -> None:
        """Close the connection: the allocator at its other end is gone."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
