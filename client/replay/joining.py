"""Schedulers that somebody else starts, in other containers for example: they join a replay over a unix socket.

The replay listens on ``DIR/replay.sock``. A scheduler connects and says one JSON line, ``{"name", "dir"}``; from
then on the connection is what the pipes are to a process that the replay started itself
(:mod:`~mambapool.client.replay.messages`). Both sides ask the kernel for the other's user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Iterator

from mambapool.client.replay.failure import ReplayFailed
from mambapool.client.replay.messages import Go, Job, Report, Reports
from mambapool.client.replay.options import ReplayOptions
from mambapool.client.replay.result import SchedulerResult
from mambapool.pool.errors import AllocatorUnavailable, RuntimeDirError
from mambapool.pool.handover import peer_uid
from mambapool.pool.polling import readable
from mambapool.pool.process_lock import ProcessLock
from mambapool.pool.runtime_dir import RuntimeDir, check_socket_path

#: Seconds that schedulers are waited for, all of them together: their containers may still be starting.
JOINED_WITHIN_S = 60.0

#: A scheduler that connects says at once who it is.
_HELLO_S = 2.0
_HELLO_BYTES = 8192

_AGAIN_S = 0.05
_NOT_YET = {errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN}


class JoinedScheduler:
    """A scheduler that joined: to a replay what a
    :class:`~mambapool.client.replay.scheduler_process.SchedulerProcess` is.

    Its exit status and what it writes to standard error are for whoever started it.
    """

    def __init__(self, connection: socket.socket, name: str, job: Job) -> None:
        self.scheduler = job.scheduler
        self.rank = job.rank
        self._name = name
        self._connection = connection
        self._reports = Reports(connection.fileno())
        self._has_result = False
        self._send(job.to_line())

    def __str__(self) -> str:
        return f"scheduler {self.scheduler} ({self._name})"

    def fileno(self) -> int:
        return self._connection.fileno()

    def go(self, origin_s: float) -> None:
        self._send(Go(origin_s).to_line())

    def read(self) -> list[Report] | None:
        try:
            reports = self._reports.read()
        except ConnectionResetError:
            return None
        self._has_result |= any(isinstance(report, SchedulerResult) for report in reports or ())
        return reports

    def wait(self, timeout_s: float) -> int | None:
        """Until it has closed its connection: 0 after its result, else 1; None if it has not in time."""
        deadline = time.monotonic() + timeout_s
        while readable(self.fileno(), timeout=deadline - time.monotonic()):
            if self.read() is None:
                return 0 if self._has_result else 1
        return None

    def how_it_ended(self, status: int | None) -> str:
        return "did not end" if status is None else "ended"

    def last_words(self) -> str:
        return "" if self._has_result else "its own log may say why"

    def ask_to_end(self) -> None:
        """It ends when it finds nobody to say its next word to, or to hear one from."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR if self._has_result else socket.SHUT_RDWR)

    def kill(self) -> None:
        """What there is to do about a process that is not one's own was done by :meth:`ask_to_end`."""

    def close(self) -> None:
        self._connection.close()

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self._connection.sendall(line)


def joined_schedulers(options: ReplayOptions) -> Iterator[JoinedScheduler]:
    """Each scheduler as it joins, numbered in that order, until all have.

    :class:`ReplayFailed` when they do not within :data:`JOINED_WITHIN_S`,
    :class:`~mambapool.pool.errors.AllocatorAlreadyRunning` when another replay waits for some there.
    """
    directory = RuntimeDir.for_client(options.dir)
    assert directory is not None, "a replay knows its daemon's directory"
    ProcessLock(directory.path / "replay.lock", "replay that waits for schedulers")
    deadline = time.monotonic() + JOINED_WITHIN_S
    with _listening(directory) as listener:
        for number in range(options.schedulers):
            connection, name, place = _next_hello(listener, deadline, f"{number} of {options.schedulers}")
            yield JoinedScheduler(connection, name, Job(number, dataclasses.replace(options, dir=place)))


def join(directory: RuntimeDir, name: str, timeout: float) -> None:
    """Join the replay of ``directory``: from then on it is at the other end of standard input and output.

    :class:`AllocatorUnavailable` when there is none within ``timeout`` seconds,
    :class:`RuntimeDirError` when it is another user's.
    """
    path = _socket_path(directory)
    deadline = time.monotonic() + timeout
    connection = socket.socket(socket.AF_UNIX)
    while (error := connection.connect_ex(path)) in _NOT_YET:
        if time.monotonic() >= deadline:
            raise AllocatorUnavailable(
                f"no replay has waited for a scheduler at {path} within {timeout:g} s: "
                "start `mambapool replay TRACE --elsewhere`"
            )
        time.sleep(_AGAIN_S)
    if error:
        raise RuntimeDirError(f"cannot join a replay at {path}: {os.strerror(error)}")
    if peer_uid(connection) not in (os.geteuid(), 0):
        raise RuntimeDirError(f"the replay at {path} runs as uid {peer_uid(connection)}, this is {os.geteuid()}")
    connection.sendall(json.dumps({"name": name, "dir": str(directory.path)}).encode() + b"\n")
    sys.stdout.flush()
    os.dup2(connection.fileno(), sys.stdin.fileno())
    os.dup2(connection.fileno(), sys.stdout.fileno())
    connection.close()


@contextlib.contextmanager
def _listening(directory: RuntimeDir) -> Iterator[socket.socket]:
    path = _socket_path(directory)
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.umask(0o077)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # left over: the lock is ours
            listener.bind(path)
        except OSError as error:
            raise RuntimeDirError(f"cannot listen on {path}: {error.strerror}") from error
        finally:
            os.umask(before)
        listener.listen()
        try:
            yield listener
        finally:
            os.unlink(path)


def _next_hello(listener: socket.socket, deadline: float, so_far: str) -> tuple[socket.socket, str, str]:
    """The next scheduler's connection, name and directory; who says nothing of the kind is sent away."""
    while readable(listener.fileno(), timeout=deadline - time.monotonic()):
        connection, _ = listener.accept()
        if peer_uid(connection) in (os.geteuid(), 0) and readable(connection.fileno(), timeout=_HELLO_S):
            try:
                hello = json.loads(connection.recv(_HELLO_BYTES))
                return connection, str(hello["name"]), str(hello["dir"])
            except (OSError, ValueError, KeyError, TypeError):
                pass
        connection.close()
    raise ReplayFailed(
        f"{so_far} schedulers joined within {JOINED_WITHIN_S:g} s: start `mambapool scheduler` as often as needed"
    )


def _socket_path(directory: RuntimeDir) -> str:
    return check_socket_path(directory.path / "replay.sock")
