"""One daemon for all tests of the client, a pool of its own for each; and child processes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon, start_daemon
from fresh_pool import FreshPool, FreshPoolFactory
from processes import children, zygote  # noqa: F401  (fixtures)


@pytest.fixture(scope="session")
def shared_daemon() -> Iterator[Daemon]:
    """A daemon without a pool. Who stops it, continues it; who ends it, uses ``daemon_factory`` instead."""
    parent = Path(tempfile.mkdtemp(prefix="mambapool-"))
    daemon = start_daemon(parent / "run", slots=None)
    yield daemon
    daemon.close()
    shutil.rmtree(parent)


@pytest.fixture
def fresh_pool(shared_daemon: Daemon) -> Iterator[FreshPoolFactory]:
    """Makes pools of so many slots; each is checked at the end of the test."""
    made: list[FreshPool] = []

    def make(slots: int) -> FreshPool:
        made.append(FreshPool(shared_daemon, slots))
        return made[-1]

    yield make
    try:
        for pool in made:
            pool.check()
    finally:
        for pool in made:
            pool.close()
