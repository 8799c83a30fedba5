"""Servers under comparison: started, waited for, ended. All of them are alive while any is measured."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mambapool.pool.polling import readable
from measuring.cores import pinned

START_S = 30.0
END_S = 10.0

_YARDSTICKS = Path(__file__).parents[1] / "yardsticks"


@contextlib.contextmanager
def daemon(core: int, *options: str) -> Iterator[Path]:
    """``mambapool serve`` with ``options``, all of its processes on ``core``; yields its directory."""
    command = [sys.executable, "-m", "mambapool.service", "serve", *options, "--dir"]
    with (
        tempfile.TemporaryDirectory(prefix="mambapool-bench-") as directory,
        running([*command, directory], core),
    ):
        yield Path(directory)


@contextlib.contextmanager
def yardstick(name: str, core: int, *arguments: object) -> Iterator[str]:
    """``yardsticks/NAME.py`` on ``core``; yields the endpoint that it serves."""
    with tempfile.TemporaryDirectory(prefix="mambapool-bench-") as directory:
        endpoint = f"ipc://{directory}/socket"
        command = [sys.executable, str(_YARDSTICKS / f"{name}.py"), endpoint, *map(str, arguments)]
        with running(command, core):
            yield endpoint


@contextlib.contextmanager
def running(command: list[str], core: int) -> Iterator[subprocess.Popen[str]]:
    """A process that says a line once it is ready; told to end afterwards."""
    with tempfile.TemporaryFile("w+") as said:
        with pinned(core):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline() if readable(process.stdout.fileno(), timeout=START_S) else ""
            if not line:
                said.seek(0)
                raise RuntimeError(f"{' '.join(command)} did not become ready:\n{said.read()}")
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
