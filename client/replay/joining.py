"""Schedulers that somebody else starts, in other containers for example: they join a replay over a unix socket.

The replay listens on ``DIR/replay.sock``. A scheduler connects and says one JSON line,
``{"name", "dir", "scheduler", "rank"}``, the last two null if any place will do; from then on the connection is what
the pipes are to a process that the replay started itself (:mod:`~mambapool.client.replay.messages`). Both sides ask
the kernel for the other's user.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _Hello:
    """Who has connected, and which place it wants; its directory, which may have another path there."""

    name: str
    dir: str
    scheduler: int | None
    rank: int | None

    @classmethod
    def from_line(cls, line: bytes) -> _Hello:
        told = json.loads(line)
        scheduler, rank = (None if told[key] is None else int(told[key]) for key in ("scheduler", "rank"))
        return cls(str(told["name"]), str(told["dir"]), scheduler, rank)

    def would_be(self, job: Job) -> bool:
        return self.scheduler in (None, job.scheduler) and self.rank in (None, job.rank)

    @property
    def wanted(self) -> str:
        return " of ".join(
            f"{what} {number}"
            for what, number in (("rank", self.rank), ("scheduler", self.scheduler))
            if number is not None
        )


class JoinedScheduler:
    """A scheduler that joined: to a replay what a
    :class:`~mambapool.client.replay.scheduler_process.SchedulerProcess` is.

    Its exit status and what it writes to standard error are for whoever started it.
    """

    def __init__(self, connection: socket.socket, name: str, job: Job) -> None:
        self.scheduler = job.scheduler
        self.rank = job.rank
        self._place = job.place
        self._name = name
        self._connection = connection
        self._reports = Reports(connection.fileno())
        self._has_result = False
        self._send(job.to_line())

    def __str__(self) -> str:
        return f"{self._place} ({self._name})"

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


def joined_schedulers(options: ReplayOptions, jobs: Sequence[Job]) -> Iterator[JoinedScheduler]:
    """Each rank of each scheduler as it joins, until all ``jobs`` are taken: the one that it asks for, or the next.

    :class:`ReplayFailed` when they do not within :data:`JOINED_WITHIN_S`, or when one asks for what is not there or
    taken; :class:`~mambapool.pool.errors.AllocatorAlreadyRunning` when another replay waits for some there.
    """
    directory = RuntimeDir.for_client(options.dir)
    assert directory is not None, "a replay knows its daemon's directory"
    ProcessLock(directory.path / "replay.lock", "replay that waits for schedulers")
    deadline = time.monotonic() + JOINED_WITHIN_S
    with _listening(directory) as listener:
        free = list(jobs)
        while free:
            connection, hello = _next_hello(listener, deadline, f"{len(jobs) - len(free)} of {len(jobs)}")
            job = next((job for job in free if hello.would_be(job)), None)
            if job is None:
                connection.close()
                raise ReplayFailed(_no_place(hello, options))
            free.remove(job)
            its_options = dataclasses.replace(options, dir=hello.dir)
            yield JoinedScheduler(connection, hello.name, dataclasses.replace(job, options=its_options))


def _no_place(hello: _Hello, options: ReplayOptions) -> str:
    return (
        f"{hello.name} cannot be {hello.wanted}: schedulers are 0 to {options.schedulers - 1}, ranks 0 to "
        f"{options.tp_size - 1}, and nobody else may be there. Give each `mambapool scheduler` a --scheduler and "
        "--rank of its own, or none of them"
    )


def join(
    directory: RuntimeDir, name: str, timeout: float, scheduler: int | None = None, rank: int | None = None
) -> None:
    """Join the replay of ``directory``: from then on it is at the other end of standard input and output.

    ``scheduler`` and ``rank``: which of them to be, counted from 0; None: any that is free.

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
    hello = _Hello(name, str(directory.path), scheduler, rank)
    connection.sendall(json.dumps(dataclasses.asdict(hello)).encode() + b"\n")
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


def _next_hello(listener: socket.socket, deadline: float, so_far: str) -> tuple[socket.socket, _Hello]:
    """The next scheduler's connection, and what it says; who says nothing of the kind is sent away."""
    while readable(listener.fileno(), timeout=deadline - time.monotonic()):
        connection, _ = listener.accept()
        if peer_uid(connection) in (os.geteuid(), 0) and readable(connection.fileno(), timeout=_HELLO_S):
            try:
                return connection, _Hello.from_line(connection.recv(_HELLO_BYTES))
            except (OSError, ValueError, KeyError, TypeError):
                pass
        connection.close()
    raise ReplayFailed(
        f"{so_far} processes joined within {JOINED_WITHIN_S:g} s: start `mambapool scheduler` for each rank of each "
        "scheduler"
    )


def _socket_path(directory: RuntimeDir) -> str:
    return check_socket_path(directory.path / "replay.sock")
