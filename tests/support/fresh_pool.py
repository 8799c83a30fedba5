"""An allocator-only pool of a test's own, in a daemon that other tests use too: starting one takes a second."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from daemons import Daemon, wait_until
from table_check import check_table, check_until_settled

from mambapool.client import Worker, connect
from mambapool.client.allocator import SlotAllocator
from mambapool.pool import slot_table as st

FreshPoolFactory = Callable[..., "FreshPool"]

_numbers = itertools.count(1)


@dataclass
class FreshPool:
    """Lives as long as its owner's session, which holds no slot."""

    daemon: Daemon
    slots: int
    name: str = field(default_factory=lambda: f"test-{next(_numbers)}")
    workers: list[Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.owner = self.connect(name="owner", create_slots=self.slots)

    def connect(self, **options: Any) -> Worker:
        """Another session of this process, closed with the pool."""
        worker = connect(self.daemon.dir, pool=self.name, **options)
        self.workers.append(worker)
        return worker

    def allocator(self, **options: Any) -> SlotAllocator:
        """The allocator of a new session."""
        return self.connect(**options).allocator

    @property
    def available(self) -> int:
        """Free slots as the owner, who frees nothing itself, sees them."""
        return self.owner.allocator.available_size()

    def status(self) -> dict[str, Any]:
        return self.daemon.pool(self.name)

    def holder(self, worker: Worker) -> dict[str, Any]:
        """A session in :meth:`status`."""
        (holder,) = [holder for holder in self.status()["holders"] if holder["session"] == worker.session]
        found: dict[str, Any] = holder
        return found

    def held_by(self, holder: Worker | int) -> set[int]:
        """The slots that are a session's in the slot table, those of its window included."""
        session = holder if isinstance(holder, int) else holder.session
        table = st.SlotTableReader(self.daemon.directory.slot_table(self.name))
        base = table.layout.field(st.OWNER)
        owners = table.words[base : base + self.slots + 1]
        return set(np.flatnonzero(owners == st.owner_word(session)).tolist())

    def settle(self) -> None:
        """Wait until all is applied that sessions of this process have posted."""
        for worker in self.workers:
            wait_until(functools.partial(_has_settled, worker), "what was posted is applied")

    def check(self) -> None:
        """Every slot is in exactly one state, in the table and in ``status``."""
        self.settle()
        check_until_settled(self._check)

    def _check(self) -> None:
        status = self.status()
        assert status["free"] + status["held"] + status["windows"] + status["offered"] == self.slots, status
        self.daemon.audit(self.name)
        check_table(self.daemon.directory.slot_table(self.name), status)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def _has_settled(worker: Worker) -> bool:
    allocator = worker.allocator
    applied, _ = allocator._table.applied_and_free(allocator._row)
    return worker._closed or applied >= worker._transport.posted.last


def granted(slots: torch.Tensor | None) -> torch.Tensor:
    """A grant, which has to be one."""
    assert slots is not None
    return slots


def ids(slots: torch.Tensor | None) -> list[int]:
    """A grant, which has to be one, as plain ids."""
    listed: list[int] = granted(slots).tolist()
    return listed


def drain(allocator: SlotAllocator) -> list[int]:
    """What ``alloc(1)`` gives until None, in order; all of it is freed again."""
    slots = []
    while (slot := allocator.alloc(1)) is not None:
        slots.append(int(slot))
    allocator.free(torch.tensor(slots))
    return slots
