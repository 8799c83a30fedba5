"""A process's session with the allocator, and the states of its pool."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mambapool.client.arguments import check_session, check_timeout
from mambapool.client.background import background
from mambapool.client.connection import CLOSED, LOST
from mambapool.client.transport import Transport
from mambapool.pool.errors import (
    ClientClosed,
    ForkedClient,
    MambaPoolError,
    PoolLost,
    ProtocolError,
)
from mambapool.pool.handover import receive_shard
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.pool.slot_table import H_LOST

if TYPE_CHECKING:
    import torch

    from mambapool.client.allocator import SlotAllocator
    from mambapool.client.fences import Fences
    from mambapool.client.group import Group
    from mambapool.client.group_transfers import GroupTransfers
    from mambapool.client.transfers import Transfers
    from mambapool.pool.state_pool import StatePool

#: close() waits so long at most for the allocator to say goodbye.
CLOSE_S = 1.0

# Strong: a session that nobody closes lives as long as its process, whatever the garbage collector does.
_workers: set[Worker] = set()


class Worker:
    """One session. Use it as a context manager, or call :meth:`close`; a process's end closes it too.

    Safe in several threads. After a fork the child's copy raises
    :class:`~mambapool.pool.errors.ForkedClient`: connect again there.
    """

    def __init__(
        self,
        transport: Transport,
        directory: RuntimeDir,
        device: str | torch.device,
        rank: int,
        deadline: float,
        group: Group | None = None,
    ) -> None:
        session = transport.session
        self._transport = transport
        self._pool: StatePool | None = None
        self._closed = False
        #: The session's number, as ``status`` shows it.
        self.session: int = transport.number
        if session["shards"]:
            self._pool = _attach_shard(directory, session["shards"], rank, device, deadline)
        debug = os.environ.get("MAMBAPOOL_DEBUG", "") not in ("", "0")
        self.allocator: SlotAllocator
        self._transfers: Transfers | GroupTransfers
        #: Of a session on a GPU: how far this process's work there is, see :mod:`mambapool.client.fences`.
        self.fences: Fences | None = None
        if on_gpu := _on_gpu(device, self._pool, transport, group, debug=debug):
            self.allocator, self.fences = on_gpu
        else:
            self.allocator = _allocator(transport, device, group, debug=debug)
        self._transfers = _transfers(transport, self.allocator, group)
        transport.connection.on_end = self.allocator.disable
        if group is not None or on_gpu is not None:
            background().add(self.allocator)  # type: ignore[arg-type]
        _workers.add(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed else repr(self.allocator)
        return f"Worker(session={self.session}, {state})"

    @property
    def states(self) -> Mapping[str, torch.Tensor]:
        """The mapped tensors, ``[layers, slots + 1, …]`` each, shared with every process of the pool.

        Empty for an allocator-only pool. Tensors already taken stay readable after :meth:`close`.
        """
        self._check_memory()
        return self._pool.states if self._pool is not None else {}

    @property
    def pool(self) -> StatePool:
        """``clear(slots)`` and ``copy(src, dst)`` over whole states."""
        if self._pool is None:
            raise MambaPoolError("this pool is allocator-only: the engine keeps its own tensors")
        self._check_memory()
        return self._pool

    def fence_streams(self, streams: Iterable[Any]) -> None:
        """Name every CUDA stream that may write to the pool: ``torch.cuda.Stream`` objects, or handles.

        Slots that are freed go to others when these streams have done what was queued on them before; without
        this call, when the whole context has (CUDA 12.5 or newer). The streams have to outlive this worker. Does
        nothing for a pool in host memory.
        """
        if self.fences is not None:
            self.fences.register(streams)

    def transfer(self, slots: torch.Tensor, to: int) -> None:
        """Offer slots to session number ``to`` of this pool, which takes them with :meth:`accept`.

        On a GPU the offer is made when the work that is queued now has finished; nobody waits for that. Until
        then they are this session's, but cannot be freed. When the receiver ends before, the offer does,
        too; when this session does, its slots are free. Never do both hold a slot, and never neither.
        """
        self._transfers.offer(slots, check_session(to))

    def accept(self, timeout: float = 0.0) -> torch.Tensor | None:
        """Take the slots of the oldest offer to this session, with their states: an int64 tensor.

        Waits ``timeout`` seconds for an offer; None when there was none.
        """
        check_timeout(timeout)
        return self._transfers.accept(timeout)

    @property
    def messages(self) -> int:
        """Messages that this session has sent so far, requests and unawaited ones."""
        return self._transport.messages

    def close(self) -> None:
        """End the session: what it holds becomes free. Returns within a second or so; twice does nothing.

        On a GPU its slots become free when its queued work has finished: later, if that takes longer than a second.
        """
        if self._closed:
            return
        self._closed = True
        _workers.discard(self)
        if self.fences is not None:
            self._close_on_gpu(self.fences)
            return
        background().remove(self._transport)
        background().remove(self.allocator)
        # No cycle: the slot table's mapping and descriptor go with the last reference.
        self._transport.connection.on_end = None
        self.allocator.disable(ClientClosed(CLOSED))
        self._transport.detach(min(CLOSE_S, self._transport.timeout))
        if self._pool is not None:
            self._pool.close()

    def _close_on_gpu(self, fences: Fences) -> None:
        from mambapool.client.fenced import Fenced
        from mambapool.client.group_calls import GroupCalls
        from mambapool.client.lingering import Lingering

        assert isinstance(self.allocator, Fenced | GroupCalls)
        deadline = time.monotonic() + min(CLOSE_S, self._transport.timeout)
        reason = ClientClosed(CLOSED)
        self._transport.connection.on_end = None
        lingering = Lingering(self._transport, self.allocator, fences)
        self.allocator.disable(reason)
        if lingering.is_over(deadline):
            self.allocator.tick()  # of a group: the others are told so
            background().remove(self.allocator)
            background().remove(self._transport)
            self._transport.detach(max(deadline - time.monotonic(), 0.1))
        else:
            lingering.start()
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_memory(self) -> None:
        if self._transport.table.items[H_LOST]:
            raise PoolLost(LOST)

    def _after_fork(self) -> None:
        """In a child: the session is the parent's, and so are the connection and the threads behind it."""
        self._closed = True
        self._transport.after_fork()
        self.allocator.disable(
            ForkedClient(
                f"session {self.session} was created before fork, by another process: connect again in the child"
            )
        )


def _allocator(
    transport: Transport, device: str | torch.device, group: Group | None, *, debug: bool
) -> SlotAllocator:
    """The kind of allocator that the session asked for, in the host's memory."""
    from mambapool.client.allocator import SlotAllocator
    from mambapool.client.guaranteed import GuaranteedAllocator

    guarantee = transport.session["guarantee"]
    if group is None:
        kind = GuaranteedAllocator if guarantee else SlotAllocator
        return kind(transport, device, debug=debug)
    from mambapool.client.group_follower import FollowerAllocator
    from mambapool.client.group_guaranteed import GroupGuaranteedAllocator
    from mambapool.client.group_leader import LeaderAllocator

    of_group = GroupGuaranteedAllocator if guarantee else FollowerAllocator if group.rank else LeaderAllocator
    return of_group(transport, device, group, debug=debug)


def _transfers(transport: Transport, allocator: SlotAllocator, group: Group | None) -> Transfers | GroupTransfers:
    from mambapool.client.group_calls import GroupCalls
    from mambapool.client.group_transfers import GroupTransfers
    from mambapool.client.transfers import Transfers

    if group is None:
        return Transfers(transport, allocator)
    assert isinstance(allocator, GroupCalls)
    return GroupTransfers(transport, allocator, group)


def _attach_shard(
    directory: RuntimeDir, shards: list[list[Any]], rank: int, device: str | torch.device, deadline: float
) -> StatePool:
    from mambapool.pool.state_pool import StatePool

    socket_name, uuid = shards[rank]
    descriptor, fd = receive_shard(directory.path / socket_name, max(deadline - time.monotonic(), 0.1))
    try:
        if descriptor.uuid != uuid:
            raise ProtocolError(
                f"{socket_name} keeps other memory than the allocator knows: its keeper was restarted; "
                "restart the allocator too"
            )
        if fd is not None:
            return StatePool.attach(descriptor, fd, device)
        from mambapool.pool.cuda_states import CudaStatePool

        return CudaStatePool.open(descriptor)
    finally:
        if fd is not None:
            os.close(fd)


def _on_gpu(
    device: str | torch.device, pool: StatePool | None, transport: Transport, group: Group | None, *, debug: bool
) -> tuple[SlotAllocator, Fences] | None:
    """The allocator of a session that has to do with a GPU; None for one that has not."""
    import torch

    if torch.device(device).type != "cuda" and (pool is None or pool.descriptor.cuda is None):
        return None
    from mambapool.client import gpu

    return gpu.allocator_on(device, pool, transport, group, debug=debug)


def _close_all() -> None:
    for worker in list(_workers):
        worker.close()


def _mark_forked() -> None:
    for worker in list(_workers):
        worker._after_fork()
    _workers.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_mark_forked)
