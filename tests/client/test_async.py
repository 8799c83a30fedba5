"""The asyncio client where it differs from the sync one: cancellation, loops, threads, and that it never blocks."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest
import pytest_asyncio
import torch
from daemons import Daemon
from fresh_pool import FreshPool, FreshPoolFactory, granted, ids
from processes import Children, paused

from mambapool.client import AsyncWorker, connect, connect_async, loop_calls
from mambapool.client.background import background
from mambapool.pool.errors import AllocatorUnavailable, ClientClosed

pytestmark = pytest.mark.asyncio

Attach = Callable[..., Coroutine[Any, Any, AsyncWorker]]
SLOTS = 64
#: How many allocs are cancelled in a row.
CANCELLED = int(os.environ.get("CANCELLED", "10000"))


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(SLOTS)


@pytest_asyncio.fixture
async def attach(pool: FreshPool) -> AsyncIterator[Attach]:
    made: list[AsyncWorker] = []

    async def connect(**options: Any) -> AsyncWorker:
        made.append(await connect_async(pool.daemon.dir, pool=pool.name, **options))
        return made[-1]

    yield connect
    for worker in made:
        await worker.close()


@pytest_asyncio.fixture
async def worker(attach: Attach) -> AsyncWorker:
    return await attach(name="engine-0")


async def eventually(condition: Callable[[], object], what: str, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.002)


async def all_accounted_for(worker: AsyncWorker, pool: FreshPool, held: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """Nobody has a slot but this client those, and no request is left anywhere."""
    await worker.allocator.free_slots  # what was posted is applied
    assert pool.held_by(worker.session) == held
    audited = pool.daemon.audit(pool.name)
    assert sum(audited.counts().values()) == pool.slots
    assert audited.counts()["windows"] == 0
    assert not worker._calls._open
    assert not worker._calls._unsent


# Cancellation.


async def test_ten_thousand_cancelled_allocs_leave_every_slot_accounted_for(
    attach: Attach, pool: FreshPool
) -> None:
    """At moments of every kind; and while another request stays open all the time."""
    worker = await attach()
    waiting = asyncio.create_task(worker.accept(timeout=600.0))
    dice = random.Random(7)
    allocator = worker.allocator
    cancelled = 0
    while cancelled < CANCELLED:
        batch = [
            asyncio.create_task(allocator.alloc(dice.choice([1, 1, 2, 5]))) for _ in range(dice.randint(1, 12))
        ]
        for _ in range(dice.randint(0, 12)):
            await asyncio.sleep(0)
        if dice.random() < 0.2:
            await asyncio.sleep(dice.random() * 0.0005)
        for task in batch:
            task.cancel()
        for result in await asyncio.gather(*batch, return_exceptions=True):
            if isinstance(result, torch.Tensor):
                await allocator.free(result)
            else:
                cancelled += isinstance(result, asyncio.CancelledError)
                assert result is None or isinstance(result, asyncio.CancelledError), result
    waiting.cancel()
    await asyncio.wait([waiting])
    assert await worker.accept() is None
    await all_accounted_for(worker, pool)
    assert sorted([int(granted(await allocator.alloc(1))) for _ in range(SLOTS)]) == list(range(1, SLOTS + 1))
    await allocator.clear()


CANCELLABLE: dict[str, Callable[[AsyncWorker, torch.Tensor], Awaitable[Any]]] = {
    "alloc": lambda worker, _: worker.allocator.alloc(1),
    "alloc of several": lambda worker, _: worker.allocator.alloc(3),
    "alloc that waits": lambda worker, _: worker.allocator.alloc(3, timeout=5.0),
    "alloc that waits in vain": lambda worker, _: worker.allocator.alloc(SLOTS, timeout=0.003),
    "begin": lambda worker, _: worker.allocator.alloc_group_begin(3),
    "end": lambda worker, _: worker.allocator.alloc_group_end(),
    "clear": lambda worker, _: worker.allocator.clear(),
    "free_slots": lambda worker, _: worker.allocator.free_slots,
    "accept": lambda worker, _: worker.accept(timeout=0.002),
}


@pytest.mark.parametrize("name", CANCELLABLE)
async def test_a_call_can_be_cancelled_in_every_pass_of_the_loop(
    worker: AsyncWorker, pool: FreshPool, name: str
) -> None:
    """Before it is sent, while it is on its way, when the answer has come and the task has not run yet."""
    allocator = worker.allocator
    outcomes = set()
    in_a_row = passes = 0
    while in_a_row < 3 and passes < 50_000:
        await allocator.alloc_group_begin(2)
        task = asyncio.ensure_future(CANCELLABLE[name](worker, torch.empty(0)))
        for _ in range(passes):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            result = await task
            if isinstance(result, torch.Tensor) and name.startswith("alloc"):
                assert result.tolist()
        outcomes.add(task.cancelled())
        in_a_row = 0 if task.cancelled() else in_a_row + 1
        passes += 1 + passes // 16
        assert await worker.accept() is None  # what became of one that was cancelled
        await allocator.clear()
        await all_accounted_for(worker, pool)
    # What never waits is never cancelled but before its first step.
    assert outcomes == {True, False}, passes
    assert ids(await allocator.alloc(2, timeout=5.0))


async def test_a_transfer_can_be_cancelled_in_every_pass_of_the_loop(attach: Attach, pool: FreshPool) -> None:
    """Made or not, never are its slots nobody's: they are the giver's, or offered, or accepted."""
    giver, receiver = await attach(), await attach()
    done = passes = 0
    while done < 3 and passes < 50_000:
        slots = granted(await giver.allocator.alloc(2))
        task = asyncio.ensure_future(giver.transfer(slots, to=receiver.session))
        for _ in range(passes):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        done = 0 if task.cancelled() else done + 1
        passes += 1
        accepted = await receiver.accept()
        if accepted is None:
            await giver.allocator.free(slots)
        else:
            assert accepted.tolist() == slots.tolist()
            await receiver.allocator.free(accepted)
        await all_accounted_for(giver, pool)
        await all_accounted_for(receiver, pool)
    assert done == 3


async def test_what_a_cancelled_accept_was_given_the_next_one_returns(attach: Attach, pool: FreshPool) -> None:
    giver, receiver = await attach(), await attach()
    slots = granted(await giver.allocator.alloc(3))
    before = receiver.messages
    waiting = asyncio.create_task(receiver.accept(timeout=60.0))
    await eventually(lambda: receiver.messages > before, "the ACCEPT was sent")
    waiting.cancel()
    await asyncio.wait([waiting])
    await giver.transfer(slots, to=receiver.session)
    assert granted(await receiver.accept()).tolist() == slots.tolist()
    assert await receiver.accept() is None
    await receiver.allocator.clear()
    await all_accounted_for(receiver, pool)


async def test_accepts_can_be_cancelled_again_and_again(attach: Attach, pool: FreshPool) -> None:
    giver, receiver = await attach(), await attach()
    accepted = 0
    for turn in range(60):
        slots = granted(await giver.allocator.alloc(1))
        tasks = [asyncio.create_task(receiver.accept(timeout=5.0)) for _ in range(2)]
        for _ in range(turn % 20):
            await asyncio.sleep(0)
        await giver.transfer(slots, to=receiver.session)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            accepted += isinstance(result, torch.Tensor)
    while await receiver.accept() is not None:
        accepted += 1
    assert accepted == 60
    assert len(pool.held_by(receiver.session)) == 60
    await receiver.allocator.clear()


async def test_a_timeout_around_a_call_gives_back_what_comes_later(worker: AsyncWorker, pool: FreshPool) -> None:
    with paused(pool.daemon):
        for call in (worker.allocator.alloc(3), worker.allocator.alloc_group_begin(3)):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 0.05)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await worker.allocator.alloc(SLOTS, timeout=30.0)
    await all_accounted_for(worker, pool)
    assert ids(await worker.allocator.alloc(2)) == [7, 8] or pool.available == SLOTS - 2


async def test_a_request_that_was_cancelled_before_it_was_sent_costs_nothing(
    worker: AsyncWorker, pool: FreshPool
) -> None:
    with paused(pool.daemon):
        # More than are on their way at once.
        tasks = [asyncio.create_task(worker.allocator.alloc(1)) for _ in range(600)]
        await eventually(
            lambda: len(worker._calls._open) == loop_calls.MAX_OPEN, "as many as may be are on their way"
        )
        sent = worker.messages
        for task in reversed(tasks):
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        assert worker.messages - sent <= loop_calls.MAX_OPEN + 8, "a CANCEL for each that was sent"
    await all_accounted_for(worker, pool)


async def test_a_clear_that_goes_by_leaves_an_alloc_its_slots(worker: AsyncWorker, pool: FreshPool) -> None:
    went_by = 0
    for _ in range(100):
        allocs = [asyncio.create_task(worker.allocator.alloc(1)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting = [task for task in allocs if not task.done()]
        await worker.allocator.clear()
        slots = {int(granted(slot)) for slot in await asyncio.gather(*waiting)}
        await worker.allocator.free_slots
        assert pool.held_by(worker.session) == slots
        assert len(slots) == len(waiting)
        went_by += len(waiting)
        await worker.allocator.clear()
    assert went_by > 100


# The loop is never blocked.


@contextlib.asynccontextmanager
async def never_blocked(at_most: float = 0.25) -> AsyncIterator[None]:
    """Inside, the loop comes by every millisecond or so."""
    gaps: list[float] = []

    async def tick() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    await eventually(lambda: gaps, "it comes by")
    try:
        yield
    finally:
        ticking.cancel()
    assert max(gaps) < at_most, f"the loop stood still for {max(gaps):.3f} s"


async def test_nothing_blocks_the_loop_while_the_allocator_is_silent(attach: Attach, pool: FreshPool) -> None:
    worker = await attach(timeout=0.6)
    with paused(pool.daemon):
        async with never_blocked():
            calls = [
                worker.allocator.alloc(1),
                worker.allocator.alloc(2, timeout=0.1),
                worker.allocator.alloc_group_begin(2),
                worker.accept(0.1),
            ]
            for result in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(result, AllocatorUnavailable), result
            began = time.monotonic()
            await worker.close()
            assert time.monotonic() - began < 1.5
    await eventually(lambda: pool.available == SLOTS, "its slots are free")


async def test_connecting_does_not_block_the_loop(attach: Attach, pool: FreshPool) -> None:
    holder = await attach()
    held = granted(await holder.allocator.alloc(SLOTS))
    async with never_blocked():
        waiting = asyncio.create_task(attach(guarantee=SLOTS, timeout=20.0))
        while not (await asyncio.to_thread(pool.status))["waiting"]:
            assert not waiting.done()
        await holder.allocator.free(held)
        worker = await waiting
    assert worker.allocator.size == SLOTS


async def test_a_free_does_not_take_away_the_sign_that_an_answer_has_come(
    worker: AsyncWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sending reads the socket's own news, too: its descriptor says nothing any more of what has come."""
    monkeypatch.setattr(loop_calls, "LOOK_S", 60.0)
    background().remove(worker._worker._transport)
    held = granted(await worker.allocator.alloc(20))
    for slot in held:
        waiting = asyncio.create_task(worker.allocator.alloc(1))
        await asyncio.sleep(0)
        time.sleep(0.005)  # the loop stands still, and the answer comes
        await worker.allocator.free(slot)
        assert await asyncio.wait_for(waiting, 5.0) is not None


async def test_what_is_granted_over_a_clear_goes_back_before_anything_else_is_asked(
    worker: AsyncWorker, pool: FreshPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_calls, "MAX_OPEN", 1)
    granted(await worker.allocator.alloc(SLOTS))
    waiting = asyncio.create_task(worker.allocator.alloc(2, timeout=10.0))
    while not (await asyncio.to_thread(pool.status))["waiting"]:
        assert not waiting.done()
    unsent = asyncio.create_task(worker.allocator.alloc(1))
    await asyncio.sleep(0)
    await worker.allocator.clear()
    held = {*granted(await waiting).tolist(), *granted(await unsent).tolist()}
    await all_accounted_for(worker, pool, held)


async def test_what_a_clear_has_freed_is_not_accepted_and_what_came_after_is(
    attach: Attach, worker: AsyncWorker, pool: FreshPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = await attach()
    steps = receiver._transfers._steps
    taken = steps.taken

    def cleared(reply: list[Any]) -> list[int]:
        monkeypatch.setattr(steps, "taken", taken)
        receiver.allocator._steps.clear()
        return taken(reply)

    monkeypatch.setattr(steps, "taken", cleared)
    await worker.transfer(granted(await worker.allocator.alloc(2)), to=receiver.session)
    assert await receiver.accept() is None
    await all_accounted_for(receiver, pool)

    waiting = asyncio.create_task(receiver.accept(timeout=10.0))
    await asyncio.sleep(0.01)
    await receiver.allocator.clear()
    await worker.transfer(granted(await worker.allocator.alloc(2)), to=receiver.session)
    accepted = granted(await waiting)
    await all_accounted_for(receiver, pool, set(accepted.tolist()))


# Connecting and closing.


async def test_a_connect_that_is_cancelled_leaves_no_session(pool: FreshPool) -> None:
    before = {holder["session"] for holder in pool.status()["holders"]}
    for delay in (0.0, 0.0005, 0.002, 0.005, 0.02):
        task = asyncio.ensure_future(connect_async(pool.daemon.dir, pool=pool.name))
        await asyncio.sleep(delay)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await task).close()
    await eventually(
        lambda: {holder["session"] for holder in pool.status()["holders"]} == before, "no session is left"
    )


async def test_connect_async_has_the_parameters_of_connect() -> None:
    assert inspect.signature(connect_async).parameters.keys() == inspect.signature(connect).parameters.keys()
    with pytest.raises(TypeError, match="frobnicate"):
        await connect_async(frobnicate=1)  # type: ignore[call-arg]


async def test_a_close_tells_those_that_wait(worker: AsyncWorker, pool: FreshPool) -> None:
    await worker.allocator.alloc(SLOTS)
    waiting = [
        asyncio.create_task(worker.allocator.alloc(1, timeout=60.0)),
        asyncio.create_task(worker.accept(timeout=60.0)),
    ]
    await eventually(lambda: len(worker._calls._open) == 2 and pool.status()["waiting"], "both wait")
    await asyncio.gather(worker.close(), worker.close())
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, ClientClosed), result


async def test_an_eviction_tells_those_that_wait(worker: AsyncWorker, pool: FreshPool) -> None:
    from mambapool.client.operators import evict

    await worker.allocator.alloc(SLOTS)
    waiting = asyncio.create_task(worker.allocator.alloc(1, timeout=60.0))
    await eventually(lambda: pool.status()["waiting"], "it waits")
    evict(pool.daemon.directory, 5.0, worker.session, force=True)
    with pytest.raises(AllocatorUnavailable, match=rf"session {worker.session} .*connect again"):
        await waiting
    with pytest.raises(AllocatorUnavailable, match="connect again"):
        await worker.accept(1.0)


# Loops and threads.


def in_another_loop(call: Callable[[], Awaitable[object]]) -> BaseException | None:
    """Await it in a thread with a loop of its own; what it raised."""
    raised: list[BaseException | None] = []

    async def run() -> None:
        await call()

    def thread() -> None:
        try:
            asyncio.run(run())
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    running = threading.Thread(target=thread)
    running.start()
    running.join()
    return raised[0]


OTHER_LOOP: dict[str, Callable[[AsyncWorker], Awaitable[object]]] = {
    "alloc": lambda worker: worker.allocator.alloc(1),
    "begin": lambda worker: worker.allocator.alloc_group_begin(1),
    "end": lambda worker: worker.allocator.alloc_group_end(),
    "free": lambda worker: worker.allocator.free(torch.tensor([1])),
    "clear": lambda worker: worker.allocator.clear(),
    "available_size": lambda worker: worker.allocator.available_size(),
    "free_slots": lambda worker: worker.allocator.free_slots,
    "transfer": lambda worker: worker.transfer(torch.tensor([1]), to=1),
    "accept": lambda worker: worker.accept(),
    "close": lambda worker: worker.close(),
}


@pytest.mark.parametrize("guarantee", [0, 8])
async def test_another_loop_is_told_and_nothing_happens(attach: Attach, pool: FreshPool, guarantee: int) -> None:
    worker = await attach(guarantee=guarantee)
    await worker.allocator.alloc(1)
    sent = worker.messages
    for name, call in OTHER_LOOP.items():
        error = in_another_loop(lambda call=call: call(worker))  # type: ignore[misc]
        assert isinstance(error, RuntimeError), name
        assert "another event loop" in str(error), name
    assert worker.messages == sent
    assert ids(await worker.allocator.alloc(1)) == [2]


async def test_every_loop_of_a_process_may_have_clients_and_a_loop_several(pool: FreshPool) -> None:
    taken: list[int] = []

    async def session(turns: int) -> None:
        async with await connect_async(pool.daemon.dir, pool=pool.name) as worker:
            for _ in range(turns):
                slots = granted(await worker.allocator.alloc(2))
                taken.extend(slots.tolist())
                await worker.allocator.free(slots)

    async def sessions() -> None:
        await asyncio.gather(*(session(50) for _ in range(3)))

    threads = [threading.Thread(target=lambda: asyncio.run(sessions())) for _ in range(3)]
    for thread in threads:
        thread.start()
    await sessions()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert len(taken) == 2 * 50 * 3 * 4
    await eventually(lambda: pool.available == SLOTS, "all slots are free")


async def test_a_call_can_be_handed_over_from_another_thread(worker: AsyncWorker) -> None:
    loop = asyncio.get_running_loop()

    def hand_over() -> list[int]:
        return ids(asyncio.run_coroutine_threadsafe(worker.allocator.alloc(2), loop).result(10.0))

    assert await asyncio.to_thread(hand_over) == [1, 2]


FORKED = """
    import asyncio, os, sys, traceback
    from mambapool.client import connect_async, errors

    async def refused(worker, slots):
        allocator = worker.allocator
        for name, call in {
            "alloc": lambda: allocator.alloc(1),
            "alloc of several": lambda: allocator.alloc(2),
            "begin": lambda: allocator.alloc_group_begin(2),
            "end": lambda: allocator.alloc_group_end(),
            "free": lambda: allocator.free(slots),
            "clear": lambda: allocator.clear(),
            "available_size": lambda: allocator.available_size(),
            "free_slots": lambda: allocator.free_slots,
            "accept": lambda: worker.accept(),
            "transfer": lambda: worker.transfer(slots, to=1),
        }.items():
            try:
                print(name, "gave", await call(), flush=True)
            except errors.ForkedClient as error:
                assert "created before fork" in str(error), error

    async def main():
        worker = await connect_async(sys.argv[1], pool=sys.argv[2])
        slots = await worker.allocator.alloc(3)
        await worker.allocator.alloc_group_begin(2)
        if (pid := os.fork()) == 0:
            try:
                await refused(worker, slots)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        print((await worker.allocator.alloc(4)).tolist(), flush=True)
        # Not closed: the process' end does it.

    asyncio.run(main())
"""


async def test_a_forked_child_is_refused_and_the_parent_goes_on(pool: FreshPool, children: Children) -> None:
    assert children.run(FORKED, pool.daemon.dir, pool.name) == ["[6, 7, 8, 9]"]
    await eventually(lambda: pool.available == SLOTS, "the process' end has given everything back")


UNCLOSED = """
    import asyncio, sys
    from mambapool.client import connect_async

    async def main():
        worker = await connect_async(sys.argv[1], pool=sys.argv[2])
        await worker.allocator.alloc(3)
        before = worker.messages
        tasks = [asyncio.create_task(worker.allocator.alloc(64, timeout=60.0)), asyncio.create_task(worker.accept(60))]
        while worker.messages < before + 2:
            await asyncio.sleep(0)
        print("bye", flush=True)

    asyncio.run(main())
"""


async def test_a_process_that_closes_nothing_ends_at_once(pool: FreshPool, children: Children) -> None:
    child = children.start(UNCLOSED, pool.daemon.dir, pool.name)
    assert child.hear() == "bye"
    began = time.monotonic()
    assert child.wait() == 0, child.stderr
    assert time.monotonic() - began < 3.0
    assert child.stderr == ""
    await eventually(lambda: pool.available == SLOTS, "its slots are free")


async def test_a_client_outlives_its_loop_until_it_is_garbage(shared_daemon: Daemon, pool: FreshPool) -> None:
    """The background thread says that it lives, and finds nobody to tell of what comes."""
    made: list[AsyncWorker] = []

    async def leave() -> None:
        made.append(await connect_async(shared_daemon.dir, pool=pool.name))
        await made[0].allocator.alloc(2)

    await asyncio.to_thread(lambda: asyncio.run(leave()))
    assert pool.held_by(made[0].session) == {1, 2}
    made[0]._worker.close()
    assert pool.available == SLOTS


async def test_a_rank_of_a_group_is_no_client_of_a_loop(pool: FreshPool) -> None:
    with pytest.raises(ValueError, match="in no fixed order, and ranks have to"):
        await connect_async(pool.daemon.dir, pool.name, group="engine-0", rank=0, world_size=2)
