"""A pool of 16 slots behind a dispatcher, checked after every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dispatching import EPOCH, Client, Connection, make_pool, make_registry
from leases import TestLeases

from mambapool.service.dispatcher import Dispatcher
from mambapool.service.pools import Pool
from mambapool.service.registry import Registry


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    """A pool named default, allocator-only, of 16 slots and 4 sessions."""
    return make_pool(tmp_path)


@pytest.fixture
def leases() -> TestLeases:
    """Every lease is held, but for those that a test adds to ``dead``."""
    return TestLeases()


@pytest.fixture
def registry(tmp_path: Path, pool: Pool, leases: TestLeases) -> Iterator[Registry]:
    registry = make_registry(tmp_path, pool, leases=leases)
    yield registry
    registry.check()


@pytest.fixture
def dispatcher(registry: Registry) -> Dispatcher:
    return Dispatcher(EPOCH, registry)


@pytest.fixture
def connection(dispatcher: Dispatcher) -> Connection:
    return Connection(dispatcher)


@pytest.fixture
def client(connection: Connection) -> Client:
    """An attached session, the first of its allocator."""
    return Client(connection)


@pytest.fixture
def join(dispatcher: Dispatcher) -> Callable[[str], Client]:
    """Attach another session under its own name, lease and connection."""

    def attach(name: str) -> Client:
        lease = name.encode().ljust(16, b".")
        return Client(Connection(dispatcher, b"zmq-" + name.encode()), lease, {"name": name})

    return attach
