"""A relay in front of the allocator's socket, for tests that cut connections as `ss -K` would."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from pathlib import Path
from types import TracebackType

_CHUNK = 1 << 16


class SocketProxy:
    """Takes the place of the unix socket ``path`` while entered; moves bytes both ways, unread.

    The file is moved aside meanwhile: who connects from now on comes through here, who is connected stays.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._aside = path.with_name(f".{path.name}.behind")
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._relay, name="socket-proxy")
        #: Connections that came through so far.
        self.accepted = 0

    def __enter__(self) -> SocketProxy:
        self._path.rename(self._aside)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stopped, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stop.send(b"x")
        self._thread.join()
        self.cut()
        self._selector.close()
        for each in (self._listener, self._stop, self._stopped):
            each.close()
        self._aside.rename(self._path)

    def cut(self) -> int:
        """Drop every connection, whatever is under way; how many there were."""
        with self._lock:
            count = len(self._peers) // 2
            for end in list(self._peers):
                self._forget(end)
        return count

    def _relay(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._stopped:
                    return
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._peers:
                        assert isinstance(key.fileobj, socket.socket)
                        self._move(key.fileobj)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.socket(socket.AF_UNIX)
        far.connect(str(self._aside))
        self.accepted += 1
        for one, other in ((near, far), (far, near)):
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _move(self, end: socket.socket) -> None:
        try:
            data = end.recv(_CHUNK)
            if data:
                self._peers[end].sendall(data)
                return
        except OSError:
            pass
        self._forget(end)

    def _forget(self, end: socket.socket) -> None:
        other = self._peers.pop(end, None)
        if other is None:
            return
        del self._peers[other]
        for each in (end, other):
            with contextlib.suppress(KeyError):
                self._selector.unregister(each)
            each.close()
