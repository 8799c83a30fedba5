"""``FencedAllocator`` for the tasks of an event loop: what the pool lacks comes from this client's own limbo."""

from __future__ import annotations

import contextlib
from typing import Any, SupportsIndex

import torch

from mambapool.client.aio_allocator import AsyncSlotAllocator
from mambapool.client.arguments import check_timeout
from mambapool.client.fenced_allocator import FencedAllocator, Found
from mambapool.client.forms import tagged, whole_number
from mambapool.pool import protocol


class AsyncFencedAllocator(AsyncSlotAllocator):
    """:class:`FencedAllocator` with ``await``. The loop waits neither for the GPU nor for the allocator.

    Work is fenced on the streams that ``worker.fence_streams`` named, whichever task has queued it, else in the whole
    context.
    """

    _steps: FencedAllocator

    async def alloc(
        self, need_size: SupportsIndex, timeout: float | None = None, tag: str | None = None
    ) -> torch.Tensor | None:
        """``need_size`` slots, or None: neither the pool nor this client's limbo has them, within ``timeout``."""
        steps = self._steps
        self._calls.check_loop()
        if timeout is not None:
            check_timeout(timeout)
        steps._catch_up()
        before = steps._posted.last
        slots = await super().alloc(need_size, None, tag)
        count = whole_number(need_size)
        if slots is None and count <= self.size:
            async with self._one_at_a_time() as deadline:
                slots = steps._hold_found(await self._own_and_more(protocol.ALLOC, count, before, tag, deadline))
        if slots is None and timeout is not None and timeout > 0:
            return await super().alloc(count, timeout, tag)
        return slots

    async def alloc_group_begin(
        self, num_reqs: SupportsIndex, partial: bool = False, tag: str | None = None
    ) -> None:
        """Open a window; what the pool lacks comes from this client's limbo."""
        steps = self._steps
        count = whole_number(num_reqs)
        before = steps._posted.last
        await super().alloc_group_begin(count, partial, tag)
        async with self._one_at_a_time() as deadline:
            if not steps._lacks(count, partial):
                return
            if partial:
                steps._fill_window(count)
            else:
                steps._open_with_own(await self._own_and_more(protocol.BEGIN, count, before, tag, deadline))

    async def _own_and_more(
        self, op: int, count: int, posted_before: int, tag: str | None, deadline: float
    ) -> Found | None:
        """As :meth:`FencedAllocator._own_and_more`. Cancelled, it has changed nothing."""
        with contextlib.closing(self._steps._find(count, posted_before)) as steps:
            try:
                missing = next(steps)
                while True:
                    arguments: tuple[Any, ...] = (missing, None, False, *tagged(tag))
                    reply = await self._calls.call(op, *arguments, deadline=deadline)
                    self._raise_refusals(reply)
                    missing = steps.send(reply)
            except StopIteration as end:
                found: Found | None = end.value
                return found
