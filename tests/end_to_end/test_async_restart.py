"""The asyncio client over an allocator that is killed: calls wait, go on, and nothing is lost or given twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal

import pytest
import torch
from daemons import Daemon
from fresh_pool import FreshPoolFactory, granted
from leased_clients import outage, restart, successor_of

from mambapool.client import AsyncWorker, connect_async
from mambapool.pool.errors import AllocatorUnavailable

pytestmark = pytest.mark.asyncio


async def keep_working(worker: AsyncWorker, stop: asyncio.Event, held: set[int], seed: int) -> int:
    """Take and give back until told to stop, giving up now and then; what is taken is nobody else's."""
    dice = random.Random(seed)
    done = 0
    while not stop.is_set():
        call = worker.allocator.alloc(dice.choice([1, 1, 3]))
        if dice.random() < 0.2:
            slots = None
            with contextlib.suppress(TimeoutError):
                slots = await asyncio.wait_for(call, dice.random() * 0.02)
        else:
            slots = await call
        if slots is None:
            await asyncio.sleep(0.001)
            continue
        mine = set(slots.tolist())
        assert not mine & held, "given twice"
        held |= mine
        await asyncio.sleep(dice.random() * 0.005)
        held -= mine
        await worker.allocator.free(slots)
        done += 1
    return done


async def test_tasks_go_on_over_restarts_and_no_slot_is_lost_or_given_twice(
    lasting_daemon: Daemon, new_pool: FreshPoolFactory
) -> None:
    pool = new_pool(24)
    held: set[int] = set()
    stop = asyncio.Event()
    async with (
        await connect_async(lasting_daemon.dir, pool=pool.name, timeout=30.0) as first,
        await connect_async(lasting_daemon.dir, pool=pool.name, timeout=30.0) as second,
    ):
        workers = [first, second] * 6
        tasks = [asyncio.create_task(keep_working(worker, stop, held, n)) for n, worker in enumerate(workers)]
        for _ in range(3):
            await asyncio.to_thread(restart, lasting_daemon)
        stop.set()
        done = await asyncio.gather(*tasks)
        assert sum(done) > 20
        for worker in (first, second):
            await worker.allocator.free_slots
            assert pool.held_by(worker.session) == set()
        assert lasting_daemon.audit(pool.name).counts()["free"] == 24


async def test_what_waits_when_the_allocator_dies_is_served_by_the_next_one(
    lasting_daemon: Daemon, new_pool: FreshPoolFactory
) -> None:
    pool = new_pool(8)
    async with await connect_async(lasting_daemon.dir, pool=pool.name, timeout=30.0) as worker:
        held = granted(await worker.allocator.alloc(8))
        waiting = asyncio.create_task(worker.allocator.alloc(3, timeout=60.0))
        accepting = asyncio.create_task(worker.accept(timeout=60.0))
        cancelled = asyncio.create_task(worker.allocator.alloc(2, timeout=60.0))
        await asyncio.sleep(0.1)
        pid = lasting_daemon.allocator_pid
        os.kill(pid, signal.SIGKILL)
        pending = asyncio.create_task(worker.allocator.alloc(1))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.to_thread(successor_of, lasting_daemon, pid)
        assert await pending is None, "somebody waits"
        await worker.allocator.free(held[:3])
        assert granted(await waiting).tolist() == [1, 2, 3]
        giver = pool.connect()
        await worker.allocator.free(held[3:4])
        slots = await asyncio.to_thread(lambda: giver.allocator.alloc(1, timeout=10.0))
        await asyncio.to_thread(giver.transfer, granted(slots), worker.session)
        assert granted(await accepting).tolist() == granted(slots).tolist()
        await worker.allocator.clear()


async def test_an_outage_longer_than_the_timeout_is_told_and_outlived(
    lasting_daemon: Daemon, new_pool: FreshPoolFactory
) -> None:
    pool = new_pool(8)
    async with await connect_async(lasting_daemon.dir, pool=pool.name, timeout=0.5) as worker:
        held = granted(await worker.allocator.alloc(2))
        away = outage(lasting_daemon)
        await asyncio.to_thread(away.__enter__)
        try:
            calls = [worker.allocator.alloc(1), worker.allocator.alloc_group_begin(2), worker.accept(0.1)]
            for result in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(result, AllocatorUnavailable), result
            await worker.allocator.free(held[:1])
        finally:
            await asyncio.to_thread(away.__exit__, None, None, None)
        slots = None
        while slots is None:
            with contextlib.suppress(AllocatorUnavailable):
                slots = await worker.allocator.alloc(1)
        assert isinstance(slots, torch.Tensor)
        await worker.allocator.free_slots
        assert pool.held_by(worker.session) == {2, int(slots)}
