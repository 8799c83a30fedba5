"""The door: the allocator's socket can be found by new clients only while there are descriptors for them.

libzmq ends the process when it has no descriptor left to accept a connection with (4.3.5, ipc_listener.cpp). So
nobody new is let in while few are free. The socket's file is moved out of the way meanwhile: to unbind would cut off
who is connected.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import stat
import threading
from pathlib import Path

from mambapool.pool.errors import AllocatorAlreadyRunning, RuntimeDirError
from mambapool.pool.runtime_dir import RuntimeDir

_log = logging.getLogger("mambapool.allocator")

#: The door is closed while fewer descriptors than these are free, or half of the limit: a session needs four,
#: and until this is noticed, libzmq accepts one in 20 µs.
SPARE_DESCRIPTORS = 512
BACKLOG = 64

# Where the socket is while nobody shall find it.
_HIDDEN = ".allocator.sock.full"


class Door:
    """Looked at by the loop now and then, and by the watcher's thread whenever somebody knocks."""

    def __init__(self, directory: RuntimeDir) -> None:
        self._open = directory.allocator_socket
        self._hidden = directory.path / _HIDDEN
        self._is_full = False
        self._lock = threading.Lock()

    def listen(self) -> socket.socket:
        """The socket, in its place, mode 0700; nothing may be there."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o077)
        try:
            listener.bind(str(self._open))
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise RuntimeDirError(f"cannot bind {self._open}: {error.strerror}") from error
        finally:
            os.umask(before)
        return listener

    def look(self) -> None:
        """Close it while descriptors are scarce: those who are here need theirs."""
        with self._lock:
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            spare = min(SPARE_DESCRIPTORS, most // 2)
            free = most - _open_descriptors(most)
            if not self._is_full and free < spare:
                self._open.rename(self._hidden)
                self._is_full = True
                _log.error("%d file descriptors are left: no new connections; raise the limit (ulimit -n)", free)
            elif self._is_full and free >= spare + spare // 4:
                self._hidden.rename(self._open)
                self._is_full = False
                _log.info("%d file descriptors are left: new connections again", free)

    def remove(self) -> None:
        """Nobody shall find it any more."""
        with self._lock:
            (self._hidden if self._is_full else self._open).unlink(missing_ok=True)


def _open_descriptors(most: int) -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # not even one for this
        return most


def remove_stale_socket(path: Path) -> None:
    """Unlink the socket of a dead process. What is no socket, or is listened to, is refused and left."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise RuntimeDirError(f"{path} is in the way and is no socket: move it, or name another --dir")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise RuntimeDirError(f"{path} is in the way: {error.strerror or error}") from error
    raise AllocatorAlreadyRunning(f"{path} is listened to by another process: stop it, or name another --dir")
