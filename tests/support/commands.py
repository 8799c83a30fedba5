"""Commands that stay, started as a user's shell starts them; and a look at the processes behind them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from mambapool.pool.polling import readable

READY_S = 30.0
END_S = 10.0


class Command:
    """A running ``mambapool …``; killed when it still runs at the end."""

    def __init__(self, *arguments: str | Path, **environment: str) -> None:
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the command
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mambapool.service", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, **environment},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()

    def ready_line(self) -> str:
        """Wait for the line that says that it is ready."""
        assert self.process.stdout is not None
        came = readable(self.process.stdout.fileno(), timeout=READY_S)
        line = self.process.stdout.readline() if came else ""
        assert line.startswith("mambapool ready"), f"{line!r}, {self.stderr}"
        return line

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self, timeout: float = END_S) -> int:
        return self.process.wait(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._stderr.close()


@contextlib.contextmanager
def running(*arguments: str | Path, **environment: str) -> Iterator[Command]:
    """A command that has said that it is ready; told to end afterwards."""
    with Command(*arguments, **environment) as command:
        command.ready_line()
        yield command


def is_running(pid: int) -> bool:
    """False for a process that has ended, also while nobody has asked for its status."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX"


def children_of(pid: int) -> list[int]:
    """The living child processes of ``pid``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_running(int(entry.name)):
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
    return found
