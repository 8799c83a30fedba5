"""Groups for tests: all ranks in this process, or a process each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from daemons import Daemon
from fresh_pool import FreshPool
from leased_clients import RemoteClient
from processes import Children

from mambapool.client import Worker, connect

_T = TypeVar("_T")

_names = itertools.count(1)


def new_name() -> str:
    """A group of a test's own."""
    return f"group-{next(_names)}"


def on_all(ranks: list[Worker], call: Callable[[Worker], _T]) -> list[_T]:
    """The same call on every rank at once, as ranks of an engine make it; what each got, by rank."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(call, ranks))


def join(pool: FreshPool, world_size: int, **options: Any) -> list[Worker]:
    """A group whose ranks are sessions of this process, closed with the pool."""
    options = {"group": new_name(), **options}
    with ThreadPoolExecutor(world_size) as threads:

        def attach(rank: int) -> Worker:
            return pool.connect(rank=rank, world_size=world_size, name=f"rank-{rank}", **options)

        return list(threads.map(attach, range(world_size)))


class RemoteGroup:
    """A group of processes, each of which does what it is told with its ``worker`` and ``allocator``."""

    def __init__(
        self, children: Children, pool: FreshPool, world_size: int, *, absent: tuple[int, ...] = (), **options: Any
    ) -> None:
        """``absent``: ranks that do not come."""
        self.name: str = options.setdefault("group", new_name())
        self.ranks = [
            RemoteClient(children, pool, rank=rank, world_size=world_size, name=f"rank-{rank}", **options)
            for rank in range(world_size)
            if rank not in absent
        ]

    def sessions(self) -> list[int]:
        """Waits until all are attached."""
        return [rank.session for rank in self.ranks]

    def ask(self, expression: str) -> list[Any]:
        """What an expression is in every rank; all are asked before the first is heard."""
        for rank in self.ranks:
            rank.begin(expression)
        return [rank.answer() for rank in self.ranks]


def connect_to(daemon: Daemon, world_size: int, **options: Any) -> list[Worker]:
    """A group on a daemon's own pool, whose ranks are sessions of this process."""
    options = {"group": new_name(), **options}

    def attach(rank: int) -> Worker:
        worker = connect(daemon.dir, rank=rank, world_size=world_size, name=f"rank-{rank}", **options)
        daemon.workers.append(worker)
        return worker

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(attach, range(world_size)))


def as_json(value: Any) -> Any:
    """As a remote client says it."""
    return json.loads(json.dumps(value))
