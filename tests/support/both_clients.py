"""The sync client behind the async one's interface, so that one suite asks both for the same."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from mambapool.client import AsyncWorker, Worker, connect, connect_async
from mambapool.client.allocator import SlotAllocator

in_thread = asyncio.to_thread


class AwaitedAllocator:
    """Each call in a thread of its own."""

    def __init__(self, allocator: SlotAllocator) -> None:
        self.sync = allocator
        self.size = allocator.size
        self.device = allocator.device

    async def alloc(self, *arguments: Any, **options: Any) -> torch.Tensor | None:
        return await in_thread(self.sync.alloc, *arguments, **options)

    async def alloc_group_begin(self, *arguments: Any, **options: Any) -> None:
        await in_thread(self.sync.alloc_group_begin, *arguments, **options)

    async def alloc_group_end(self) -> None:
        await in_thread(self.sync.alloc_group_end)

    async def free(self, free_index: torch.Tensor) -> None:
        await in_thread(self.sync.free, free_index)

    async def clear(self) -> None:
        await in_thread(self.sync.clear)

    async def available_size(self) -> int:
        return await in_thread(self.sync.available_size)

    async def schedulable_available_size(self) -> int:
        return await in_thread(self.sync.schedulable_available_size)

    @property
    def free_slots(self) -> Coroutine[Any, Any, torch.Tensor]:
        return in_thread(lambda: self.sync.free_slots)


class AwaitedWorker:
    """:class:`Worker` as :class:`AsyncWorker`."""

    def __init__(self, worker: Worker) -> None:
        self.sync = worker
        self.allocator = AwaitedAllocator(worker.allocator)
        self.session = worker.session

    @property
    def states(self) -> Any:
        return self.sync.states

    @property
    def pool(self) -> Any:
        return self.sync.pool

    @property
    def messages(self) -> int:
        return self.sync.messages

    async def transfer(self, slots: torch.Tensor, to: int) -> None:
        await in_thread(self.sync.transfer, slots, to)

    async def accept(self, timeout: float = 0.0) -> torch.Tensor | None:
        return await in_thread(self.sync.accept, timeout)

    async def close(self) -> None:
        await in_thread(self.sync.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


AnyWorker = AsyncWorker | AwaitedWorker


async def connect_either(kind: str, directory: Path, **options: Any) -> AnyWorker:
    """``kind`` is ``sync`` or ``async``."""
    if kind == "async":
        return await connect_async(directory, **options)
    return AwaitedWorker(await in_thread(connect, directory, **options))
