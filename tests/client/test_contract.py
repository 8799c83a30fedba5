"""What both clients promise, asked of both: the sync one's calls are awaited, too, each in a thread of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
import torch
from both_clients import AnyWorker, connect_either
from fresh_pool import FreshPool, FreshPoolFactory, granted, ids
from processes import paused

from mambapool.client import AsyncWorker
from mambapool.pool import protocol
from mambapool.pool.errors import (
    AllocatorUnavailable,
    BadIndexTensor,
    ClientClosed,
    DoubleFree,
    DuplicateSlot,
    GuaranteeExceeded,
    InvalidSlots,
    NotHolder,
    ReservedSlot,
    SlotOutOfRange,
    UnknownPool,
)

pytestmark = pytest.mark.asyncio

Connect = Callable[..., Awaitable[AnyWorker]]
SLOTS = 16


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(SLOTS)


@pytest_asyncio.fixture
async def attach(kind: str, pool: FreshPool) -> AsyncIterator[Connect]:
    """Makes sessions of the pool, closed at the end of the test."""
    made: list[AnyWorker] = []

    async def connect(**options: Any) -> AnyWorker:
        made.append(await connect_either(kind, pool.daemon.dir, **{"pool": pool.name, **options}))
        return made[-1]

    yield connect
    for worker in made:
        await worker.close()


@pytest_asyncio.fixture
async def worker(attach: Connect) -> AnyWorker:
    return await attach(name="engine-0", timeout=2.0)


async def test_slots_come_in_sglangs_order_as_int64_tensors(worker: AnyWorker) -> None:
    allocator = worker.allocator
    assert (allocator.size, str(allocator.device)) == (SLOTS, "cpu")
    first, second = granted(await allocator.alloc(3)), granted(await allocator.alloc(5))
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [4, 5, 6, 7, 8])
    assert (first.dtype, first.shape) == (torch.int64, (3,))
    await allocator.free(torch.tensor([7, 2]))
    assert (await allocator.free_slots).tolist() == [*range(9, 17), 7, 2]
    assert ids(await allocator.alloc(10)) == [*range(9, 17), 7, 2]
    assert await allocator.alloc(1) is None
    assert await allocator.available_size() == await allocator.schedulable_available_size() == 0


async def test_nothing_more_than_everything_or_nothing(worker: AnyWorker) -> None:
    allocator = worker.allocator
    empty = granted(await allocator.alloc(0))
    assert (empty.dtype, empty.shape) == (torch.int64, (0,))
    assert await allocator.alloc(SLOTS + 1) is None
    assert await allocator.alloc(10**12) is None
    with pytest.raises(ValueError, match="-1 slots"):
        await allocator.alloc(-1)
    with pytest.raises(TypeError):
        await allocator.alloc(1.5)  # type: ignore[arg-type]
    await allocator.free(torch.empty(0, dtype=torch.int64))
    assert await allocator.available_size() == SLOTS


async def test_a_window_costs_two_messages_and_gives_back_what_is_left(worker: AnyWorker) -> None:
    allocator = worker.allocator
    before = worker.messages
    await allocator.alloc_group_begin(6)
    one, two = granted(await allocator.alloc(1)), granted(await allocator.alloc(1))
    assert await allocator.available_size() == SLOTS - 6
    await allocator.free(one)
    assert await allocator.available_size() == SLOTS - 5
    await allocator.alloc_group_end()
    await allocator.alloc_group_end()
    assert worker.messages == before + 2
    assert await allocator.available_size() == SLOTS - 1
    assert (await allocator.free_slots).tolist() == [*range(7, 17), 1, 3, 4, 5, 6]
    await allocator.free(two)


async def test_a_window_is_all_or_nothing_unless_partial(worker: AnyWorker) -> None:
    allocator = worker.allocator
    held = granted(await allocator.alloc(12))
    await allocator.alloc_group_begin(5)
    assert ids(await allocator.alloc(1)) == [13], "by a message: there is no window"
    await allocator.alloc_group_begin(5, partial=True)
    assert [ids(await allocator.alloc(1)) for _ in range(3)] == [[14], [15], [16]]
    assert await allocator.alloc(1) is None
    await allocator.free(held)
    # Another begin: what was freed inside goes along.
    await allocator.alloc_group_begin(2, tag="again")
    assert ids(await allocator.alloc(1)) == [1]
    await allocator.alloc_group_begin(0)


async def test_clear_frees_all_of_this_client_and_nothing_of_others(attach: Connect) -> None:
    mine, others = await attach(), await attach()
    await mine.allocator.alloc(4)
    held = granted(await others.allocator.alloc(2))
    await mine.allocator.alloc_group_begin(3)
    await mine.allocator.alloc(1)
    await mine.allocator.clear()
    assert await mine.allocator.available_size() == SLOTS - 2
    await others.allocator.free(held)
    assert sorted((await others.allocator.free_slots).tolist()) == list(range(1, SLOTS + 1))


MISUSES = [
    ([1, 1], DuplicateSlot),
    ([0], ReservedSlot),
    ([SLOTS + 1], SlotOutOfRange),
    ([5], NotHolder),
    ([6], DoubleFree),
    ([3], DoubleFree),
]


@pytest.mark.parametrize(("slots", "error"), MISUSES)
async def test_misuse_names_the_slots_and_changes_nothing(
    attach: Connect, slots: list[int], error: type[InvalidSlots]
) -> None:
    worker, other = await attach(), await attach()
    await worker.allocator.alloc(4)
    await other.allocator.alloc(1)
    await worker.allocator.free(torch.tensor([3]))
    before = await worker.allocator.available_size()
    with pytest.raises(error) as caught:
        await worker.allocator.free(torch.tensor(slots))
    assert set(caught.value.slots) == set(slots)
    with pytest.raises(BadIndexTensor):
        await worker.allocator.free(torch.tensor([True, False]))
    assert await worker.allocator.available_size() == before
    assert ids(await worker.allocator.alloc(1)) == [6]


async def test_who_waits_gets_its_slots_in_turn(attach: Connect, pool: FreshPool) -> None:
    first, second, holder = await attach(), await attach(), await attach()
    held = granted(await holder.allocator.alloc(SLOTS))
    waiting = [asyncio.create_task(first.allocator.alloc(3, timeout=20.0, tag="waited"))]
    await _waited_for(pool, 3)
    waiting.append(asyncio.create_task(second.allocator.alloc(1, timeout=20.0)))
    await _waited_for(pool, 4)
    await holder.allocator.free(held[:2])
    assert await holder.allocator.alloc(1) is None, "nobody overtakes"
    await holder.allocator.free(held[2:5])
    assert ids(await waiting[0]) == [1, 2, 3]
    assert ids(await waiting[1]) == [4]
    tags = {holding.slot: holding.tag for holding in pool.daemon.audit(pool.name).holdings()}
    assert (tags[1], tags[4]) == ("waited", None)


async def test_a_wait_that_ends_without_slots_is_none(worker: AnyWorker) -> None:
    await worker.allocator.alloc(SLOTS)
    began = time.monotonic()
    assert await worker.allocator.alloc(2, timeout=0.2) is None
    assert 0.2 <= time.monotonic() - began < 2.0
    assert await worker.allocator.available_size() == 0


async def test_other_calls_go_on_while_one_waits_however_many(worker: AnyWorker) -> None:
    """More than the allocator keeps replies for."""
    held = granted(await worker.allocator.alloc(SLOTS))
    waiting = asyncio.create_task(worker.accept(timeout=60.0))
    await worker.allocator.free(held)
    for turn in range(1200):
        slot = await worker.allocator.alloc(1)
        assert slot is not None, turn
        await worker.allocator.free(slot)
    assert not waiting.done()
    await worker.close()
    with pytest.raises((ClientClosed, AllocatorUnavailable)):
        await waiting


async def test_slots_go_from_one_session_to_another(attach: Connect) -> None:
    giver, receiver = await attach(), await attach()
    slots = granted(await giver.allocator.alloc(3))
    assert await receiver.accept() is None
    waiting = asyncio.create_task(receiver.accept(timeout=10.0))
    await giver.transfer(slots[:2], to=receiver.session)
    assert ids(await waiting) == [1, 2]
    with pytest.raises(NotHolder):
        await giver.allocator.free(slots[:1])
    with pytest.raises(InvalidSlots, match="no other session"):
        await giver.transfer(slots[2:], to=10**6)
    await giver.allocator.free(slots[2:])
    await receiver.allocator.free(torch.tensor([2, 1]))
    assert await receiver.accept(timeout=0.05) is None


async def test_a_guarantee_is_run_without_messages(attach: Connect) -> None:
    worker, other = await attach(guarantee=4), await attach()
    allocator = worker.allocator
    before = worker.messages
    assert (allocator.size, await allocator.available_size()) == (4, 4)
    await allocator.alloc_group_begin(2, tag="stays here")
    one = granted(await allocator.alloc(1))
    await allocator.alloc_group_end()
    rest = granted(await allocator.alloc(3, tag="stays here"))
    assert await allocator.alloc(1) is None
    assert await allocator.alloc(5, timeout=5.0) is None, "it never has so many"
    waiting = asyncio.create_task(allocator.alloc(1, timeout=10.0))
    await asyncio.sleep(0)
    await allocator.free(rest[:1])
    assert ids(await waiting) == rest[:1].tolist()
    await allocator.clear()
    assert (await allocator.free_slots).tolist() == [1, 2, 3, 4]
    assert worker.messages == before
    assert int(one) in (1, 2, 3, 4)
    assert await other.allocator.alloc(SLOTS - 3) is None
    with pytest.raises(GuaranteeExceeded):
        await attach(guarantee=SLOTS)


async def test_a_limit_is_kept(attach: Connect) -> None:
    worker = await attach(limit=3)
    assert await worker.allocator.available_size() == 3
    assert await worker.allocator.alloc(4) is None
    assert ids(await worker.allocator.alloc(3)) == [1, 2, 3]
    assert await worker.allocator.alloc(1) is None


CALLS: dict[str, Callable[[AnyWorker], Awaitable[object]]] = {
    "alloc": lambda worker: worker.allocator.alloc(1),
    "alloc of several": lambda worker: worker.allocator.alloc(2),
    "alloc that waits": lambda worker: worker.allocator.alloc(2, timeout=1.0),
    "begin": lambda worker: worker.allocator.alloc_group_begin(2),
    "end": lambda worker: worker.allocator.alloc_group_end(),
    "free": lambda worker: worker.allocator.free(torch.tensor([1])),
    "clear": lambda worker: worker.allocator.clear(),
    "available_size": lambda worker: worker.allocator.available_size(),
    "free_slots": lambda worker: worker.allocator.free_slots,
    "transfer": lambda worker: worker.transfer(torch.tensor([1]), to=1),
    "accept": lambda worker: worker.accept(),
    "accept that waits": lambda worker: worker.accept(timeout=1.0),
}


@pytest.mark.parametrize("guarantee", [0, 4])
async def test_after_a_close_every_call_says_so_and_what_was_held_is_free(
    attach: Connect, pool: FreshPool, guarantee: int
) -> None:
    worker = await attach(guarantee=guarantee)
    await worker.allocator.alloc(2)
    await worker.allocator.alloc_group_begin(2)
    began = time.monotonic()
    async with worker:
        pass
    await worker.close()
    assert time.monotonic() - began < 2.0
    assert pool.available == SLOTS
    for call in CALLS.values():
        with pytest.raises(ClientClosed, match="connect again"):
            await call(worker)


ANSWERED = (
    "alloc",
    "alloc of several",
    "alloc that waits",
    "begin",
    "free_slots",
    "transfer",
    "accept that waits",
)


@pytest.mark.parametrize("name", ANSWERED)
async def test_an_allocator_that_is_silent_is_told_within_the_timeout(
    attach: Connect, pool: FreshPool, name: str
) -> None:
    worker = await attach(timeout=0.4)
    held = granted(await worker.allocator.alloc(2))
    with paused(pool.daemon):
        await worker.allocator.free(held[1:])
        began = time.monotonic()
        with pytest.raises(AllocatorUnavailable, match=r"within 0\.4 s"):
            await CALLS[name](worker)
        assert 0.3 < time.monotonic() - began < 4.0
    # The client is usable, and nothing is lost: the slot that was on offer may be ours or not.
    assert ids(await worker.allocator.alloc(1, timeout=5.0))
    await worker.allocator.clear()
    assert (await worker.allocator.free_slots).numel() == SLOTS


async def test_a_refusal_of_something_posted_is_raised_by_the_next_call(
    worker: AnyWorker, pool: FreshPool
) -> None:
    sync = worker._worker if isinstance(worker, AsyncWorker) else worker.sync
    await worker.allocator.alloc(2)
    sync._transport.post(protocol.FREE, 9, 1)  # a FREE of slot 9, which the client's own record would refuse
    while not sync._transport.refusals:
        await asyncio.sleep(0.005)
    with pytest.raises(DoubleFree, match="9"):
        await worker.allocator.alloc(1)
    assert ids(await worker.allocator.alloc(1)) == [3]
    assert len(pool.held_by(worker.session)) == 3


async def test_a_pool_that_there_is_not_is_named(attach: Connect) -> None:
    with pytest.raises(UnknownPool, match="there is no pool 'nowhere'"):
        await attach(pool="nowhere")
    with pytest.raises(ValueError, match="timeout"):
        await attach(timeout=0)


async def test_many_at_once_get_different_slots(worker: AnyWorker) -> None:
    got = await asyncio.gather(*(worker.allocator.alloc(1) for _ in range(SLOTS + 4)))
    slots = [int(slot) for slot in got if slot is not None]
    assert sorted(slots) == list(range(1, SLOTS + 1))
    await asyncio.gather(*(worker.allocator.free(torch.tensor([slot])) for slot in slots))
    assert (await worker.allocator.free_slots).numel() == SLOTS


async def _waited_for(pool: FreshPool, slots: int) -> None:
    deadline = time.monotonic() + 10.0
    while pool.status()["waiting"] != slots:
        assert time.monotonic() < deadline, f"{slots} slots are waited for"
        await asyncio.sleep(0.005)
