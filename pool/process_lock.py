"""One process per role and runtime directory: a record lock that dies with its process."""

from __future__ import annotations

import os
import time
from pathlib import Path

from mambapool.pool import record_lock
from mambapool.pool.errors import AllocatorAlreadyRunning, RuntimeDirError
from mambapool.pool.regular_files import open_regular


class ProcessLock:
    """Held from the call until the process ends, however it ends.

    The file is never opened a second time in this process: closing any descriptor of it would drop the
    lock. It is left in place, since unlinking it would let two processes lock two files of one name.
    """

    def __init__(self, path: Path, role: str, *, wait_s: float = 0.0) -> None:
        """Take the lock, or raise :class:`AllocatorAlreadyRunning` that names the holder's pid.

        With ``wait_s`` the holder is given that long to end: a child of ``serve`` may find the orphan of a
        ``serve`` that was killed, which ends by itself.
        """
        self.path = path
        try:
            self._fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise RuntimeDirError(
                f"cannot open the lock file {path}: {error.strerror}; mend that, or name another directory "
                "with --dir"
            ) from error
        deadline = time.monotonic() + wait_s
        while not record_lock.take(self._fd):
            if time.monotonic() >= deadline:
                holder = self._holder()
                os.close(self._fd)
                raise AllocatorAlreadyRunning(
                    f"another {role} (pid {holder}) has {path.parent}: stop it first, or name another --dir"
                )
            time.sleep(0.02)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _holder(self) -> str:
        pid = record_lock.holder(self._fd)
        # In another PID namespace the kernel shows 0 there: the holder's own word is the next best.
        return str(pid) if pid else os.pread(self._fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
