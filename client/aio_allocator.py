"""``SlotAllocator`` for the tasks of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, SupportsIndex

import torch

from mambapool.client.allocator import SlotAllocator
from mambapool.client.arguments import check_timeout
from mambapool.client.forms import tagged, whole_number
from mambapool.client.guaranteed import GuaranteedAllocator
from mambapool.client.loop_calls import LoopCalls
from mambapool.pool import protocol

# How often an alloc that waits for a slot of a guarantee looks whether another task has freed one.
_LOOK_S = 0.001


class AsyncSlotAllocator:
    """:class:`~mambapool.client.allocator.SlotAllocator` with ``await``: what it says of each method holds here.

    Tasks do not wait for each other's answers: any number of ``alloc`` is on its way at once. A window belongs to the
    client, not to the task that opened it.

    A call that is cancelled, by ``asyncio.timeout`` for one, gives back what it was granted, whenever that comes. It
    leaves nothing half done: an ``alloc_group_begin`` has ended the window before, and opens none.
    """

    def __init__(self, allocator: SlotAllocator, calls: LoopCalls) -> None:
        self.size = allocator.size
        self.device = allocator.device
        self._calls = calls
        # What needs no waiting is done by its steps; its own calls, which wait in their thread, are never made.
        self._steps = allocator
        #: One task at a time opens or ends a window.
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"Async{self._steps!r}"

    async def available_size(self) -> int:
        """How many slots an ``alloc`` could get now; no message."""
        self._calls.check_loop()
        return self._steps.available_size()

    async def schedulable_available_size(self) -> int:
        """The same number: this pool is static, as SGLang's is."""
        return await self.available_size()

    @property
    def free_slots(self) -> Coroutine[Any, Any, torch.Tensor]:
        """The free list as far as this client can know it, to be awaited: ``await allocator.free_slots``."""
        return self._free_slots()

    async def alloc(
        self, need_size: SupportsIndex, timeout: float | None = None, tag: str | None = None
    ) -> torch.Tensor | None:
        """``need_size`` slots as an int64 tensor, or None: not so many are free, within ``timeout`` seconds."""
        self._calls.check_loop()
        if tag is not None:
            protocol.check_tag(tag)
        steps = self._steps
        if need_size == 1 and (one := steps._next_of_window()) is not None:
            return one
        count = whole_number(need_size)
        if timeout is not None:
            check_timeout(timeout)
        steps._check_usable()
        if count == 0:
            return steps._tensors.copy_of([])
        if count > self.size:
            return None
        deadline = time.monotonic() + (timeout or 0.0)
        while True:
            clears = steps._clears
            reply = await self._ask_for(count, max(deadline - time.monotonic(), 0.0), tag)
            if reply is None:
                steps._check_usable()
                return None
            if clears == steps._clears:
                return steps._granted(reply)
            # A clear() went by: whether before the grant or after it, nobody here can tell. It is asked for anew.
            self._calls.cancel(reply)

    async def alloc_group_begin(
        self, num_reqs: SupportsIndex, partial: bool = False, tag: str | None = None
    ) -> None:
        """Open a window of ``num_reqs`` slots, which ``alloc(1)`` then drains without messages."""
        self._calls.check_loop()
        if tag is not None:
            protocol.check_tag(tag)
        count = whole_number(num_reqs)
        async with self._one_at_a_time() as deadline:
            steps = self._steps
            steps._check_usable()
            if count == 0:
                steps.alloc_group_end()
                return
            carried = steps._close_window(protocol.FREE)
            frees = None if carried is None else carried.argument
            # No pool has more slots, and the wire carries no larger number than an int32.
            arguments = (min(count, self.size + 1), frees, bool(partial), *tagged(tag))
            reply = await self._calls.call(protocol.BEGIN, *arguments, frees=carried, deadline=deadline)
            self._raise_refusals(reply)
            if reply[2] != protocol.NONE:
                steps._open_window(reply)

    async def alloc_group_end(self) -> None:
        """Close the window: one message, unawaited, with what was freed inside and what is left unused."""
        self._calls.check_loop()
        async with self._one_at_a_time():
            self._steps.alloc_group_end()

    async def free(self, free_index: torch.Tensor, after: Any = None) -> None:
        """Give slots back. Never waits: it cannot be cancelled half way."""
        self._calls.check_loop()
        self._steps.free(free_index, after)

    async def clear(self) -> None:
        """Free everything that this client holds, and nothing of anybody else; ends its window."""
        self._calls.check_loop()
        async with self._one_at_a_time():
            self._steps.clear()

    async def _free_slots(self) -> torch.Tensor:
        self._calls.check_loop()
        self._steps._check_usable()
        return self._steps._list_of(await self._calls.settle())

    async def _ask_for(self, count: int, wait: float, tag: str | None) -> list[Any] | None:
        """The reply to an ALLOC, None when it was waited for in vain."""
        carried = self._steps._take_freed()
        frees = None if carried is None else carried.argument
        arguments = (count, frees, wait > 0, *tagged(tag))
        if wait > 0:
            return await self._calls.call_and_wait(protocol.ALLOC, *arguments, frees=carried, wait=wait)
        reply = await self._calls.call(protocol.ALLOC, *arguments, frees=carried)
        self._raise_refusals(reply)
        return reply

    def _raise_refusals(self, reply: list[Any]) -> None:
        """As if a call had not been made when something that was posted before it was refused."""
        if self._steps._refusals:
            self._calls.cancel(reply)
            self._steps._check_usable()

    @contextlib.asynccontextmanager
    async def _one_at_a_time(self) -> AsyncIterator[float]:
        """Yields until when a call may take; waiting for the turn counts."""
        deadline = time.monotonic() + self._calls.timeout
        try:
            async with asyncio.timeout(self._calls.timeout):
                await self._turn.acquire()
        except TimeoutError:
            raise self._calls.unavailable(
                f"another task's call waited for it for {self._calls.timeout:g} s"
            ) from None
        try:
            yield deadline
        finally:
            self._turn.release()


class AsyncGuaranteedAllocator(AsyncSlotAllocator):
    """:class:`~mambapool.client.guaranteed.GuaranteedAllocator` with ``await``: no call costs a message."""

    async def alloc(
        self, need_size: SupportsIndex, timeout: float | None = None, tag: str | None = None
    ) -> torch.Tensor | None:
        """``need_size`` slots, or None: not so many are free, within ``timeout`` seconds."""
        self._calls.check_loop()
        if timeout is not None:
            check_timeout(timeout)
        deadline = time.monotonic() + (timeout or 0.0)
        while True:
            slots = self._steps.alloc(need_size, tag=tag)
            if slots is not None or time.monotonic() >= deadline or whole_number(need_size) > self.size:
                return slots
            await asyncio.sleep(_LOOK_S)

    async def alloc_group_begin(
        self, num_reqs: SupportsIndex, partial: bool = False, tag: str | None = None
    ) -> None:
        """Open a window of ``num_reqs`` slots; all or nothing, unless ``partial``. No message either."""
        self._calls.check_loop()
        self._steps.alloc_group_begin(num_reqs, partial, tag)

    async def _free_slots(self) -> torch.Tensor:
        self._calls.check_loop()
        return self._steps.free_slots


def async_allocator(allocator: SlotAllocator, calls: LoopCalls) -> AsyncSlotAllocator:
    """The one that fits."""
    if isinstance(allocator, GuaranteedAllocator):
        return AsyncGuaranteedAllocator(allocator, calls)
    if allocator.offers_later:
        from mambapool.client.aio_fenced import AsyncFencedAllocator

        return AsyncFencedAllocator(allocator, calls)
    return AsyncSlotAllocator(allocator, calls)
