"""Keepers and clients as real processes, and a small pool for them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mambapool.pool.descriptor import ShardDescriptor
from mambapool.pool.keeper import KeeperConfig
from mambapool.pool.layout import Geometry, TensorSpec
from mambapool.pool.runtime_dir import RuntimeDir

DEADLINE_S = 20.0


@pytest.fixture
def runtime() -> Iterator[RuntimeDir]:
    """An empty runtime directory. Not tmp_path, which can be too long for a socket."""
    path = tempfile.mkdtemp(prefix="mambapool-")
    yield RuntimeDir.for_server(path)
    shutil.rmtree(path)


@pytest.fixture
def geometry() -> Geometry:
    """A state of which one tensor has 64 bytes per slot, the other 40 KiB."""
    return Geometry((TensorSpec.parse("conv=bfloat16:2x8x2"), TensorSpec.parse("temporal=float32:2x64x80")))


@pytest.fixture
def config(runtime: RuntimeDir, geometry: Geometry) -> KeeperConfig:
    return KeeperConfig(runtime.path, "default", rank=0, tp_size=1, slots=8, geometry=geometry)


@pytest.fixture
def descriptor(geometry: Geometry) -> ShardDescriptor:
    return ShardDescriptor("default", bytes(range(16)), 0, 1, slots=8, geometry=geometry, pid=4242)


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process with pipes; ended with the test."""
    with contextlib.ExitStack() as stack:

        def start(*command: str | Path, **options: Any) -> subprocess.Popen[str]:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = subprocess.Popen(command, text=True, **(pipes | options))
            # Leaving the Popen waits for the process and closes its pipes; it is killed just before.
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def python(spawn: Callable[..., subprocess.Popen[str]]) -> Callable[..., subprocess.Popen[str]]:
    """Start Python on a program that is given as text, with arguments."""

    def start(program: str, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
        return spawn(sys.executable, "-W", "error", "-c", program, *arguments, **options)

    return start


@pytest.fixture
def launch_keeper(spawn: Callable[..., subprocess.Popen[str]]) -> Callable[..., subprocess.Popen[str]]:
    """Start a keeper whose ready line comes out of ``stdout``; ``before`` is put in front of the command."""
    # Nothing else may come out of it: the keeper's own standard output goes to its standard error.
    ready_is_stdout = ("sh", "-c", 'exec "$@" --ready-fd 3 3>&1 1>&2', "sh")

    def launch(config: KeeperConfig, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        module = ("-W", "error", "-m", "mambapool.pool.keeper")
        return spawn(*ready_is_stdout, *before, sys.executable, *module, config.to_json())

    return launch


@pytest.fixture
def start_keeper(
    launch_keeper: Callable[..., subprocess.Popen[str]],
) -> Callable[..., subprocess.Popen[str]]:
    """Start a keeper and return when clients can connect to it."""

    def start(config: KeeperConfig, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        process = launch_keeper(config, before)
        assert process.stdout is not None
        # To the end, because the keeper closes its side of the pipe a moment after the line.
        ready = json.loads(process.stdout.read())
        assert ready.get("ready") is True, ready
        assert ready["pid"] == process.pid
        return process

    return start


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait until a condition holds, and fail when it does not in time."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "did not happen in time"
            time.sleep(0.01)

    return wait


@pytest.fixture
def no_fd_leaked() -> Iterator[None]:
    """The test leaves as many file descriptors open as it found."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before
