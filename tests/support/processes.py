"""Child processes for tests: scripts that are told and heard line by line, and an allocator that stands still."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon, wait_until
from zygote import NO_TEARDOWN, Pipes, Zygote

from mambapool.pool import slot_table as st
from mambapool.pool.polling import readable

#: Bounds every wait for a child.
WAIT_S = 30.0

#: In a script's environment: it ends wholly as an interpreter does, and not after its atexit functions.
TORN_DOWN = {NO_TEARDOWN: ""}


class Lines:
    """The lines that come through a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._said = b""

    def next(self, timeout: float) -> str | None:
        """The next line, with its end; empty at the end of all, None if none came in time."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._said:
            if not readable(self._fd, timeout=deadline - time.monotonic()):
                return None
            piece = os.read(self._fd, 65536)
            if not piece:
                break
            self._said += piece
        line, end, self._said = self._said.partition(b"\n")
        return (line + end).decode()

    def waiting(self) -> bool:
        """Whether :meth:`next` would find something at once."""
        return bool(self._said or readable(self._fd, timeout=0))

    def close(self) -> None:
        os.close(self._fd)


class Child:
    """A running script."""

    def __init__(self, pipes: Pipes) -> None:
        self._input = os.fdopen(pipes.input, "w", buffering=1)
        self._output = Lines(pipes.output)
        self._told = Lines(pipes.status)
        self._stderr = pipes.stderr
        self._status: int | None = None
        self._closed = False
        self.pid = int(self._told.next(WAIT_S) or 0)

    def say(self, line: str) -> None:
        """One line to its stdin."""
        self._input.write(line + "\n")

    def say_no_more(self) -> None:
        """The end of its stdin."""
        self._input.close()

    def hear(self, timeout: float = WAIT_S) -> str:
        """The next line of its stdout, without the line's end."""
        line = self._output.next(timeout)
        assert line is not None, f"process {self.pid} said nothing for {timeout:g} s:\n{self.stderr}"
        assert line, f"the script ended with status {self.wait()}:\n{self.stderr}"
        return line.rstrip("\n")

    def has_said_something(self) -> bool:
        """Whether :meth:`hear` has something to hear, be it its end."""
        return self._output.waiting()

    def wait(self, timeout: float = WAIT_S) -> int:
        """Its exit status, negative for a signal."""
        if self._status is None:
            line = self._told.next(timeout)
            assert line is not None, f"process {self.pid} did not end within {timeout:g} s:\n{self.stderr}"
            self._status = int(line)
        return self._status

    def rest(self, timeout: float = WAIT_S) -> list[str]:
        """Wait for its end, which has to be status 0; the lines of stdout that nobody heard."""
        assert self.wait(timeout) == 0, self.stderr
        return [line.rstrip("\n") for line in iter(lambda: self._output.next(0) or "", "")]

    @property
    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()

    def close(self) -> None:
        """Kill it if it still runs."""
        if self._closed:
            return
        self._closed = True
        if self._status is None and not self._told.waiting():
            with contextlib.suppress(ProcessLookupError):  # its end is being told just now
                os.kill(self.pid, signal.SIGKILL)
        self.wait()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._output.close()
        self._told.close()
        self._stderr.close()


class Children:
    """Starts scripts; those that still run at the end of a test are killed."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._started: list[Child] = []

    def start(self, source: str, *arguments: object, **environment: str) -> Child:
        """Run ``source`` with ``sys.argv[1:]`` = ``arguments``."""
        child = Child(self._zygote.start(source, arguments, environment))
        self._started.append(child)
        return child

    def run(self, source: str, *arguments: object, **environment: str) -> list[str]:
        """Run ``source`` to its end, which has to be status 0; the lines of its stdout."""
        return self.start(source, *arguments, **environment).rest()

    def close(self) -> None:
        for child in self._started:
            child.close()


@functools.cache
def _the_zygote() -> Zygote:
    return Zygote(environment={NO_TEARDOWN: "1"})


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One for all directories of tests that have this fixture."""
    yield _the_zygote()
    if _the_zygote.cache_info().currsize:
        _the_zygote().close()
        _the_zygote.cache_clear()


@pytest.fixture
def children(zygote: Zygote) -> Iterator[Children]:
    """Starts scripts as processes."""
    started = Children(zygote)
    yield started
    started.close()


@contextlib.contextmanager
def paused(daemon: Daemon) -> Iterator[None]:
    """The allocator is stopped inside: not merely told to, and not in the middle of a change."""
    pid = daemon.allocator_pid
    while True:
        with daemon.stopped():
            wait_until(lambda: _state_of(pid) == "T", "the allocator is stopped")
            tables = [st.SlotTableReader(path) for path in daemon.dir.glob("*.table")]
            if all(table.items[st.H_SEQ] == table.items[st.H_DONE] for table in tables):
                yield
                return


def _state_of(pid: int) -> str:
    """R, S, T …: the field after the command's name in proc_pid_stat(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
