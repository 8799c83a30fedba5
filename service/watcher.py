"""The watcher: a thread that notices within milliseconds that a client's process has died.

Every client keeps a connection to ``DIR/lease.sock`` open. Its end, or that of the process behind it (a pidfd
from SO_PEERPIDFD, Linux 6.5, which also works between PID namespaces), is a hint; the released lock of the
lease is the proof. A sweep over all locks is the backstop for hints that never come: a forked child can hold
its parent's connection open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mambapool.pool.errors import RuntimeDirError
from mambapool.pool.polling import readable
from mambapool.pool.runtime_dir import RuntimeDir, check_socket_path
from mambapool.service.leases import Lock, WatchedLock, left_over, open_lease, remove_left_over

_log = logging.getLogger("mambapool.allocator")

# <asm-generic/socket.h>; Python 3.11 has no name for it.
SO_PEERPIDFD = 77
_UCRED = struct.Struct("3i")

#: How often all locks are looked at, hint or none.
SWEEP_S = 1.0
#: How often the lock of a lease is looked at after a hint: it is released a little later than the connection.
_AFTER_HINT_S = 0.001
#: … and for how long, before it is left to the sweep: a process of 2 GB takes 300 ms to end.
_HINT_LASTS_S = 2.0
#: Descriptors of connections and their processes, two each: of more clients the sweep has to do.
_MOST_WATCHED = 8192

Notify = Callable[[bytes, str], None]


@dataclass(eq=False)
class _Connection:
    """One client's connection, and its process."""

    socket: socket.socket
    pidfd: int
    lease: bytes | None = None

    def close(self) -> None:
        self.socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Watcher:
    """Tells ``notify(lease name, how it was noticed)`` from its own thread when a watched lease is released."""

    def __init__(self, directory: RuntimeDir, notify: Notify) -> None:
        self._directory = directory
        self._notify = notify
        self._lock = threading.Lock()
        self._leases: dict[bytes, WatchedLock] = {}
        #: Lease → how it was noticed, and until when its lock is looked at often.
        self._hinted: dict[bytes, tuple[str, float]] = {}
        self._by_fd: dict[int, _Connection] = {}
        self._processes: dict[int, bytes] = {}
        #: Lease → its process, which may end later than its connection.
        self._holders: dict[bytes, int] = {}
        self._path = directory.lease_socket
        self._listener = _listen(directory)
        self._wake, self._woken = socket.socketpair()
        self._epoll = select.epoll()
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._epoll.register(self._wake.fileno(), select.EPOLLIN)
        #: Until the first sweep, which looks at them again.
        self._left_over = left_over(directory)
        self._door = -1
        self._on_knock: Callable[[], None] = lambda: None
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def open(self, name: bytes) -> WatchedLock:
        """From the loop's thread: look after this lease; raises :class:`ProtocolError` unless it is held."""
        lease = open_lease(self._directory, name)
        with self._lock:
            self._leases[name] = lease
        return lease

    def watch_process(self, lock: WatchedLock, pid: int) -> None:
        """Look after another process's lock, that of a keeper; before :meth:`start`."""
        self._leases[lock.name] = lock
        # In another PID namespace the number means nothing here: then the sweep has to do.
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            self._processes[pidfd] = lock.name
            self._epoll.register(pidfd, select.EPOLLIN)

    def watch_door(self, listener: int, on_knock: Callable[[], None]) -> None:
        """Call ``on_knock`` from the watcher's thread when somebody connects to ``listener``; before :meth:`start`."""
        self._door, self._on_knock = listener, on_knock
        # At the edge: somebody else accepts them.
        self._epoll.register(listener, select.EPOLLIN | select.EPOLLET)

    def has_ended(self, name: bytes) -> bool | None:
        """From the loop's thread: whether that lease's process has ended; None where there is no pidfd of it."""
        with self._lock:
            pidfds = [c.pidfd for c in list(self._by_fd.values()) if c.lease == name and c.pidfd >= 0]
            pidfds += [self._holders[name]] if name in self._holders else []
            return bool(readable(pidfds[0], timeout=0)) if pidfds else None

    def forget(self, lease: Lock, *, dead: bool) -> None:
        """From the loop's thread: its session is gone. The file of a dead one is removed, too."""
        with self._lock:
            self._leases.pop(lease.name, None)
            self._hinted.pop(lease.name, None)
            holder = self._holders.pop(lease.name, None)
        if holder is not None:
            os.close(holder)
        if dead:
            lease.remove()
        else:
            lease.close()

    def close(self) -> None:
        self._ending = True
        self._woken.send(b"x")
        if self._thread.ident is not None:  # else what it would have watched for could not be built
            self._thread.join()
        for connection in set(self._by_fd.values()):
            connection.close()
        for pidfd in [*self._processes, *self._holders.values()]:
            os.close(pidfd)
        self._epoll.close()
        self._listener.close()
        self._wake.close()
        self._woken.close()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        next_sweep = time.monotonic() + SWEEP_S
        while not self._ending:
            wait = _AFTER_HINT_S if self._hinted else max(next_sweep - time.monotonic(), 0)
            ready = [fd for fd, _events in self._epoll.poll(wait, 64)]
            if self._door in ready:
                self._on_knock()
            for fd in ready:
                if fd in self._by_fd:
                    self._look_at(self._by_fd[fd], fd)
                elif fd in self._processes:
                    self._process_ended(fd)
            # Last: it may get a descriptor that was closed just now, of which something is still told here.
            if self._listener.fileno() in ready:
                self._accept()
            now = time.monotonic()
            self._test_hinted(now)
            if now >= next_sweep:
                next_sweep = now + SWEEP_S
                self._sweep()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            _log.warning("cannot accept a lease connection: %s", error.strerror)
            time.sleep(0.05)  # out of descriptors: do not spin
            return
        client.setblocking(False)
        if _peer_uid(client) not in (os.geteuid(), 0) or len(self._by_fd) > _most_watched():
            client.close()
            return
        connection = _Connection(client, _peer_pidfd(client))
        for fd in (client.fileno(), connection.pidfd):
            if fd >= 0:
                self._by_fd[fd] = connection
                self._epoll.register(fd, select.EPOLLIN)

    def _look_at(self, connection: _Connection, fd: int) -> None:
        """Something happened: the lease's name came, or the connection or its process ended."""
        if fd == connection.pidfd:
            self._drop(connection, "its process ended")
            return
        try:
            said = connection.socket.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said and connection.lease is None:
            connection.lease = said
        elif not said:
            self._drop(connection, "its connection closed")

    def _process_ended(self, pidfd: int) -> None:
        self._epoll.unregister(pidfd)
        os.close(pidfd)
        self._hint(self._processes.pop(pidfd), "its process ended")

    def _drop(self, connection: _Connection, how: str) -> None:
        for fd in (connection.socket.fileno(), connection.pidfd):
            if self._by_fd.pop(fd, None) is not None:
                self._epoll.unregister(fd)
        self._keep_process(connection)
        connection.close()
        if connection.lease is not None:
            self._hint(connection.lease, how)

    def _keep_process(self, connection: _Connection) -> None:
        """What the connection knew of its process, for as long as its session may ask for it."""
        with self._lock:
            if connection.lease in self._leases and connection.pidfd >= 0:
                before = self._holders.pop(connection.lease, None)
                self._holders[connection.lease], connection.pidfd = connection.pidfd, -1
                if before is not None:
                    os.close(before)

    def _hint(self, name: bytes, how: str) -> None:
        with self._lock:
            if name in self._leases:
                self._hinted[name] = (how, time.monotonic() + _HINT_LASTS_S)

    def _test_hinted(self, now: float) -> None:
        if not self._hinted:
            return
        with self._lock:
            hinted = [(self._leases[name], how, end) for name, (how, end) in self._hinted.items()]
            for lease, how, end in hinted:
                if not lease.is_held():
                    self._tell(lease, how)
                elif now > end:
                    del self._hinted[lease.name]

    def _sweep(self) -> None:
        remove_left_over(self._directory, self._left_over)
        self._left_over = []
        with self._lock:
            for lease in list(self._leases.values()):
                if not lease.is_held():
                    self._tell(lease, "the sweep found its lock released")

    def _tell(self, lease: WatchedLock, how: str) -> None:
        self._hinted.pop(lease.name, None)
        self._notify(lease.name, how)


def _most_watched() -> int:
    """Half of what there may be: the others are for sockets and leases, without which nobody is served."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(_MOST_WATCHED, most // 2)


def _listen(directory: RuntimeDir) -> socket.socket:
    """The allocator's lock is held, so that whatever socket is there is left over."""
    path = directory.lease_socket
    check_socket_path(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = os.umask(0o077)
    try:
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise RuntimeDirError(f"{path} is in the way and is no socket: move it, or name another --dir")
            path.unlink()
        listener.bind(str(path))
    except RuntimeDirError:
        listener.close()
        raise
    except OSError as error:
        listener.close()
        raise RuntimeDirError(f"cannot listen on {path}: {error.strerror}") from error
    finally:
        os.umask(before)
    listener.listen(256)
    listener.setblocking(False)
    return listener


def _peer_uid(client: socket.socket) -> int:
    _pid, uid, _gid = _UCRED.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def _peer_pidfd(client: socket.socket) -> int:
    """-1 where there is none to be had: then the connection and the sweep have to do."""
    try:
        return client.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        pid, _uid, _gid = _UCRED.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    try:
        # Before Linux 6.5. The pid is 0 when the process is in a PID namespace that cannot be seen from here.
        return os.pidfd_open(pid) if pid > 0 else -1
    except OSError:
        return -1
