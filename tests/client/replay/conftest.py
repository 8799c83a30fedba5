"""A pool in this process, for schedulers that run without a daemon."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from mambapool.client.replay.request import Request
from mambapool.pool.errors import DoubleFree, DuplicateSlot, NotHolder

CONV = (torch.bfloat16, (2, 6, 3))
TEMPORAL = (torch.float32, (3, 2, 4))
Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class LocalPool:
    """SGLang's allocation order and this project's checks, with the states in ordinary memory.

    ``double_grant`` names a call of ``alloc`` or ``alloc_group_begin``, counted from 1 over all workers,
    whose slots stay on the free list, first in line.
    """

    def __init__(self, slots: int, tensors: Tensors | None = None, double_grant: int | None = None) -> None:
        self.slots = slots
        self.free = deque(range(1, slots + 1))
        self.holder: dict[int, LocalWorker] = {}
        self.grants = 0
        #: Whether a slot was handed out while somebody held it.
        self.doubled = False
        self._double_grant = double_grant
        self.states = {
            name: torch.randn(layers, slots + 1, *shape).to(dtype)
            for name, (dtype, (layers, *shape)) in (tensors or {"conv": CONV, "temporal": TEMPORAL}).items()
        }

    def connect(self) -> LocalWorker:
        return LocalWorker(self)

    def grant(self, n: int, worker: LocalWorker) -> list[int] | None:
        self.grants += 1
        if n > len(self.free):
            return None
        slots = [self.free.popleft() for _ in range(n)]
        if self.grants == self._double_grant:
            self.free.extendleft(reversed(slots))
        self.doubled |= any(slot in self.holder for slot in slots)
        self.holder.update(dict.fromkeys(slots, worker))
        return slots

    def take_back(self, slots: list[int], worker: LocalWorker) -> None:
        twice = [slot for slot in set(slots) if slots.count(slot) > 1]
        if twice:
            raise DuplicateSlot(f"slots {twice} are named twice", twice)
        free = [slot for slot in slots if slot not in self.holder]
        if free:
            raise DoubleFree(f"slots {free} are free already", free)
        foreign = [slot for slot in slots if self.holder[slot] is not worker]
        if foreign:
            raise NotHolder(f"slots {foreign} are held by another session", foreign)
        for slot in slots:
            del self.holder[slot]
        self.free.extend(slots)


class LocalWorker:
    """What ``connect`` returns, as far as a replay uses it; is its own allocator and its own state pool."""

    def __init__(self, pool: LocalPool) -> None:
        self._pool = pool
        self._window: list[int] = []
        self.states = pool.states
        self.size = pool.slots
        self.messages = 1  # HELLO
        self.calls: list[str] = []

    @property
    def allocator(self) -> LocalWorker:
        return self

    @property
    def pool(self) -> LocalWorker:
        return self

    def available_size(self) -> int:
        return len(self._pool.free)

    def alloc(self, n: int, /) -> torch.Tensor | None:
        self.calls.append(f"alloc({n})")
        if n == 1 and self._window:
            return torch.tensor([self._window.pop(0)])
        self.messages += 1
        slots = self._pool.grant(n, self)
        return None if slots is None else torch.tensor(slots)

    def alloc_group_begin(self, n: int, /) -> None:
        self.calls.append(f"begin({n})")
        self.messages += 1
        self._window = self._pool.grant(n, self) or []

    def alloc_group_end(self) -> None:
        self.calls.append("end")
        self.messages += 1
        self._pool.take_back(self._window, self)
        self._window = []

    def free(self, slots: torch.Tensor, /) -> None:
        self.calls.append(f"free({len(slots)})")
        self.messages += 1
        self._pool.take_back(slots.tolist(), self)

    def copy(self, src: torch.Tensor, dst: torch.Tensor, /) -> None:
        for state in self.states.values():
            state[:, dst] = state[:, src]


MakePool = Callable[..., LocalPool]
MakeRequests = Callable[..., list[Request]]


@pytest.fixture(scope="session")
def make_pool() -> MakePool:
    return LocalPool


@pytest.fixture(scope="session")
def make_requests() -> MakeRequests:
    """Requests from pairs of (arrival in ms, steps)."""

    def make(pairs: Iterable[tuple[float, int]]) -> list[Request]:
        return [Request(index, arrival, 100, steps) for index, (arrival, steps) in enumerate(pairs)]

    return make


@pytest.fixture
def write_trace(tmp_path: Path) -> Callable[[str | bytes, str], Path]:
    def write(content: str | bytes, name: str = "trace.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write
