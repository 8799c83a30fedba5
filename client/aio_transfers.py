"""``transfer`` and ``accept`` for the tasks of an event loop."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch

from mambapool.client.forms import packed_ids
from mambapool.client.loop_calls import LoopCalls, Pending
from mambapool.client.transfers import Transfers
from mambapool.pool import protocol
from mambapool.pool.errors import InvalidSlots, MambaPoolError


class AsyncTransfers:
    """Offers and accepts slots of one session."""

    def __init__(self, transfers: Transfers, calls: LoopCalls) -> None:
        self._steps = transfers
        self._calls = calls
        self._turn = asyncio.Lock()
        #: An ACCEPT that was given up: no CANCEL takes back what it got, so that it stays open until that is known.
        self._unresolved: Pending | None = None
        #: How often ``clear()`` had been called when it was made.
        self._clears = 0

    async def offer(self, slots: torch.Tensor, receiver: int) -> None:
        self._calls.check_loop()
        if self._steps.offer_later(slots, receiver):
            return
        ids = self._steps.begin_offer(slots)
        try:
            await self._calls.call(protocol.OFFER, packed_ids(ids), receiver)
        except InvalidSlots:
            if self._steps.end_offer(ids):
                raise
        finally:
            self._steps.offered(ids)

    async def accept(self, timeout: float) -> torch.Tensor | None:
        self._calls.check_loop()
        deadline = time.monotonic() + timeout
        try:
            async with asyncio.timeout(timeout):
                await self._turn.acquire()
        except TimeoutError:
            return None  # another task is waiting for the next offer, and would have got it
        try:
            self._steps.check_usable()
            if self._unresolved is not None and (slots := await self._resolve(self._unresolved)) is not None:
                return slots
            self._clears = self._steps.clears
            self._unresolved = pending = self._calls.start(protocol.ACCEPT, True)
            # Not awaited itself: that would cancel it with the task.
            await asyncio.wait([pending.future], timeout=max(deadline - time.monotonic(), 0.0))
            return await self._resolve(pending)
        finally:
            self._turn.release()

    async def _resolve(self, pending: Pending) -> torch.Tensor | None:
        """What became of it; it waits no longer."""
        if not pending.future.done():
            self._calls.ask_again(pending, False)
            await asyncio.wait([pending.future], timeout=self._calls.timeout)
        if not pending.future.done():
            raise self._calls.unavailable(f"no answer within {self._calls.timeout:g} s")
        try:
            reply = self._calls.finish(pending)
        except MambaPoolError:
            self._unresolved = None
            raise
        taken = await self._take(reply)
        self._unresolved = None
        return taken

    async def _take(self, reply: list[Any]) -> torch.Tensor | None:
        """As :meth:`Transfers._take`. Cancelled, it is done anew by the next accept."""
        slots = self._steps.taken(reply)
        while slots:
            if (tensor := self._steps.hold(slots, self._clears)) is not None:
                return tensor
            clears = self._steps.clears
            await self._calls.settle()
            slots, self._clears = self._steps.still_ours(slots, reply), clears
        return None
