"""Fixtures of all tests: runtime directories, and daemons that are checked at the end of every test."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemons import Daemon, start_daemon


@pytest.fixture(autouse=True, scope="module")
def _collect_garbage() -> Iterator[None]:
    """Mapped files go with the objects over them: not thousands of descriptors later."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own MAMBAPOOL_ variables are not for the daemons of tests."""
    for name in list(os.environ):
        if name.startswith("MAMBAPOOL_"):
            monkeypatch.delenv(name)


DaemonFactory = Callable[..., Daemon]


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A directory with a short path: socket paths have at most 107 bytes."""
    parent = Path(tempfile.mkdtemp(prefix="mambapool-"))
    yield parent / "run"
    shutil.rmtree(parent)


@pytest.fixture
def daemon_factory(runtime_dir: Path) -> Iterator[DaemonFactory]:
    """Starts daemons (:func:`daemons.start_daemon`); those that still run at the end are checked and ended."""
    started: list[Daemon] = []

    def start(directory: Path | None = None, **options: object) -> Daemon:
        daemon = start_daemon(directory or runtime_dir, **options)  # type: ignore[arg-type]
        started.append(daemon)
        return daemon

    yield start
    try:
        for daemon in started:
            if daemon.process.poll() is None:
                daemon.check()
    finally:
        for daemon in started:
            daemon.close()


@pytest.fixture
def daemon(daemon_factory: DaemonFactory) -> Daemon:
    """A daemon with an allocator-only pool of 64 slots."""
    return daemon_factory(slots=64)
