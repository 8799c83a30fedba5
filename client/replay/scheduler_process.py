"""A scheduler process as the replay that started it sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from typing import IO

from mambapool.client.replay.messages import Go, Job, Report, Reports

#: Bytes of a process's standard error that an error message quotes.
_QUOTED_BYTES = 2000


class SchedulerProcess:
    """One started process, its pipes, and what it wrote to standard error."""

    def __init__(self, job: Job) -> None:
        self.scheduler = job.scheduler
        self.rank = job.rank
        self._place = job.place
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, open for as long as the process
        # -P: a folder of the directory that the user happens to be in must not stand in for a package.
        # One thread each: the schedulers share the processors, and would only take them from each other.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mambapool.client.replay.worker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._reports = Reports(self.fileno())
        self._send(job.to_line())

    def __str__(self) -> str:
        return f"{self._place} (pid {self._process.pid})"

    def fileno(self) -> int:
        """What to wait on for :meth:`read`."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def go(self, origin_s: float) -> None:
        self._send(Go(origin_s).to_line())

    def read(self) -> list[Report] | None:
        """The reports that have come, when something has; None when the process has said its last."""
        return self._reports.read()

    def wait(self, timeout_s: float) -> int | None:
        """The exit status, negative for a signal's number; None if the process has not ended in time."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def how_it_ended(self, status: int | None) -> str:
        """What :meth:`wait` returned, in words."""
        if status is None:
            return "did not end"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with exit status {status}"

    def last_words(self) -> str:
        """The end of what the process wrote to standard error."""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _QUOTED_BYTES))
        return self._stderr.read().decode("utf-8", "replace").strip()

    def ask_to_end(self) -> None:
        """Ask a process that still runs to end, wherever it is: a signal does not end the wait for a line."""
        if self._process.poll() is None:
            self._process.terminate()
            self._close_stdin()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the pipes and the file of a process that has ended."""
        self._close_stdin()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()

    def _close_stdin(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass

    def _send(self, line: bytes) -> None:
        """Write to a process that may have died: its end is noticed where its reports are read."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
