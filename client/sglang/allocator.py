"""SGLang's ``MambaSlotAllocator`` over a pool of the daemon: the class that SGLang makes."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from mambapool.client.sglang.engine import GROUP, Engine
from mambapool.pool.errors import ConfigError, DoubleFree, NotHolder
from mambapool.pool.runtime_dir import POOL_NAME

if TYPE_CHECKING:
    from mambapool.client.allocator import SlotAllocator
    from mambapool.client.worker import Worker

_log = logging.getLogger("mambapool.sglang")

_numbers = itertools.count()

#: The session of a state pool (:mod:`mambapool.client.sglang.states`) whose allocator SGLang makes next.
_mapped: list[Worker] = []

# Sessions whose allocator is gone. Closed when the next one is made, or with the process: a collector runs
# anywhere, also where a lock is held that closing needs.
_left: deque[Worker] = deque()


_living: weakref.WeakSet[MambaSlotAllocator] = weakref.WeakSet()
_streams: list[Any] = []


class MambaSlotAllocator:
    """SGLang 0.5's class of this name: its constructor, names, meanings and order; no call costs a message.

    Its slots are a pool of its own, named after the engine and numbered in the order in which the process makes
    them, so that ranks agree; or those of the state pool that was made just before. They are granted whole: an
    engine plans with ``size``, and asserts that it gets them. Where a session is lost, the allocator's calls
    raise what :class:`~mambapool.client.allocator.SlotAllocator`'s do.
    """

    def __init__(self, *, size: int, device: str) -> None:
        """Attach with a guarantee of ``size`` slots, 1 or more. Raises what ``connect`` does, and
        :class:`~mambapool.pool.errors.ConfigError`."""
        if size < 1:
            raise ConfigError(f"size={size}: SGLang asserts that it gets what it plans with; 1 slot at least")
        close_left()
        worker = _mapped.pop() if _mapped else _own_pool(size, device)
        self._finalizer = weakref.finalize(self, _left.append, worker)
        self._finalizer.atexit = False  # connect() closes what is left then
        self._worker = worker
        self._allocator: SlotAllocator = worker.allocator
        self.size: int = self._allocator.size
        if self.size != size:
            raise ConfigError(f"size={size}: the state pool before it was made with {self.size} slots")
        self.device = device
        if _streams:
            worker.fence_streams(_streams)
        _living.add(self)
        #: What was held when clear() was called, and nobody has freed since.
        self._dead: set[int] = set()

    def __repr__(self) -> str:
        return f"MambaSlotAllocator({self._allocator!r})"

    @property
    def free_slots(self) -> torch.Tensor:
        """The free list, head first: a new int64 tensor."""
        return self._allocator.free_slots

    def available_size(self) -> int:
        """How many slots are free."""
        return self._allocator.available_size()

    def schedulable_available_size(self) -> int:
        """The same number, as in SGLang's static pool."""
        return self._allocator.available_size()

    def alloc_group_begin(self, num_reqs: int) -> None:
        """Open a window of so many slots, if there are so many; a window that is open ends first."""
        self._allocator.alloc_group_begin(num_reqs)

    def alloc_group_end(self) -> None:
        """Close the window: what is left of it goes to the end of the list."""
        self._allocator.alloc_group_end()

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """So many slots as an int64 tensor of shape ``(need_size,)``, or None."""
        return self._allocator.alloc(need_size)

    def free(self, free_index: torch.Tensor) -> None:
        """Give slots back.

        What was handed out before a :meth:`clear` and comes back only now is logged and left out: SGLang resets
        its pools while references are still around. Everything else that is not held raises.
        """
        try:
            self._allocator.free(free_index)
        except (DoubleFree, NotHolder) as error:
            if not self._dead.issuperset(error.slots):
                raise
            self._dead.difference_update(error.slots)
            _log.warning("free: slots %s were handed out before the last clear()", list(error.slots))
            living = [slot for slot in free_index.reshape(-1).tolist() if slot not in error.slots]
            self._allocator.free(torch.tensor(living, dtype=torch.int64))

    def clear(self) -> None:
        """Every slot is free again, in ascending order; an open window ends."""
        self._dead.update(self._allocator.held())
        self._allocator.clear()


def fence_streams(streams: list[Any]) -> None:
    """``worker.fence_streams`` of every allocator of this process, those that are made later included."""
    _streams[:] = streams
    for allocator in list(_living):
        allocator._worker.fence_streams(streams)


def close_left() -> None:
    """End the sessions of allocators that nobody has any more."""
    while _left:
        _left.pop().close()


def leave_for_allocator(worker: Worker) -> None:
    """The next allocator is this session's: SGLang makes it right after the state pool."""
    while _mapped:  # an allocator that was never made
        _mapped.pop().close()
    _mapped.append(worker)


def _own_pool(size: int, device: str) -> Worker:
    engine = Engine.of_process()
    pool = f"{engine.name}-{next(_numbers)}"
    if not POOL_NAME.fullmatch(pool):
        raise ConfigError(f"{GROUP}={engine.name!r} gives the pool {pool!r}: use 1 to 32 of a-z 0-9 _ - for both")
    worker = engine.attach(pool, device=device, guarantee=size, create_slots=size)
    _log.info("SGLang's allocator of %d slots: pool %s, session %d", size, pool, worker.session)
    return worker
