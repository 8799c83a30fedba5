"""``connect_async`` on a GPU: what a session has freed waits for the GPU, and no task does."""

from __future__ import annotations

import pytest
from gpu_pools import GpuPool

PRELUDE = """
import asyncio
from mambapool.client import connect_async
gpu = Gpu()
stream = gpu.stream()
async def within(condition, timeout=3.0):
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.002)
class Ticks:
    "How long the loop has been held up at most: on a busy machine for a while, never for as long as the GPU works."
    async def __aenter__(self):
        self.longest = 0.0
        self.task = asyncio.create_task(self.run())
        return self
    async def run(self):
        while True:
            started = time.monotonic()
            await asyncio.sleep(0.001)
            self.longest = max(self.longest, time.monotonic() - started)
    async def __aexit__(self, *_error):
        self.task.cancel()
"""


@pytest.mark.parametrize("mutation", ["", "no fence"])
def test_a_slot_is_anothers_only_when_the_write_before_its_free_is_over(gpu_pool: GpuPool, mutation: str) -> None:
    script = (
        PRELUDE
        + """
if sys.argv[2] == "no fence":
    from mambapool.client.fenced_limbo import FencedLimbo
    pop = FencedLimbo.pop_passed
    FencedLimbo.pop_passed = lambda self, passed, *others: pop(self, 1 << 60, *others)
async def main():
    async with await connect_async(directory, device="cuda") as giver, await connect_async(directory) as taker:
        giver.fence_streams([stream])
        slot, *_ = (await giver.allocator.alloc(8)).split(1)
        rows = giver.states["temporal"][:, int(slot)]
        gpu.delay(stream, 0.9)
        gpu.fill(stream, rows, 7)
        async with Ticks() as ticks:
            started = time.monotonic()
            await giver.allocator.free(slot)
            mine = await taker.allocator.alloc(1, timeout=5.0)
            waited = time.monotonic() - started
        mark(taker, mine)
        await asyncio.sleep(1.0 - min(waited, 1.0))
        say(waited > 0.7, ticks.longest < 0.6, bytes_of(rows))
asyncio.run(main())
"""
    )
    assert gpu_pool.run(script, mutation) == ["False True {7}" if mutation else "True True {9}"]


def test_a_full_pool_serves_its_tasks_from_their_own_limbo(gpu_pool: GpuPool) -> None:
    script = (
        PRELUDE
        + """
async def main():
    async with await connect_async(directory, device="cuda") as worker, await connect_async(directory) as other:
        worker.fence_streams([stream])
        other.fence_streams([gpu.stream()])
        allocator = worker.allocator
        slots = await allocator.alloc(6)
        rest = await other.allocator.alloc(2)
        gpu.delay(stream, 0.5)
        await allocator.free(slots[:4].tolist())
        say(await allocator.available_size(), await other.allocator.available_size(), await other.allocator.alloc(1))
        say(await allocator.alloc(5), (await allocator.alloc(1)).tolist(), (await allocator.alloc(2)).tolist())
        await allocator.alloc_group_begin(2)
        await allocator.alloc_group_begin(1)
        say((await allocator.alloc(1)).tolist(), await allocator.alloc(1))
        await allocator.alloc_group_end()
        await other.allocator.free(rest)
        await within(lambda: worker.allocator._steps._table.free_count == 2)
        gpu.delay(stream, 0.5)
        await allocator.free([1])
        # The pool has 7 and 8, the rest is its own: at once, while the stream is busy.
        say(sorted((await allocator.alloc(3)).tolist()), await allocator.available_size())
        await allocator.clear()
        await allocator.alloc_group_begin(10, partial=True)
        window = [int(await allocator.alloc(1)) for _ in range(8)]
        say(sorted(window), await allocator.alloc(1))
        await allocator.alloc_group_end()
asyncio.run(main())
"""
    )
    assert gpu_pool.run(script) == [
        "4 0 None",
        "None [1] [2, 3]",
        "[4] None",
        "[1, 7, 8] 0",
        "[1, 2, 3, 4, 5, 6, 7, 8] None",
    ]


def test_a_cancelled_alloc_leaves_the_limbo_as_it_was(gpu_pool: GpuPool) -> None:
    script = (
        PRELUDE
        + """
async def main():
    async with await connect_async(directory, device="cuda") as worker:
        worker.fence_streams([stream])
        slots = await worker.allocator.alloc(6)
        gpu.delay(stream, 0.6)
        await worker.allocator.free(slots[:4].tolist())
        pid = int(hear())
        allocator, own_and_more = worker.allocator, worker.allocator._own_and_more
        def stop_first(*arguments):
            os.kill(pid, 19)  # what the limbo lacks is asked for, and nobody answers
            return own_and_more(*arguments)
        allocator._own_and_more = stop_first
        try:
            async with asyncio.timeout(0.1):
                await worker.allocator.alloc(6)
        except TimeoutError:
            say("cancelled")
        os.kill(pid, 18)
        allocator._own_and_more = own_and_more
        say((await worker.allocator.alloc(6)).tolist())
asyncio.run(main())
"""
    )
    child = gpu_pool.start(script)
    child.say(str(gpu_pool.daemon.allocator_pid))
    assert child.rest() == ["cancelled", "[7, 8, 1, 2, 3, 4]"]


def test_a_guarantee_costs_no_message_and_ids_of_clones_are_not_waited_for(gpu_pool: GpuPool) -> None:
    script = (
        PRELUDE
        + """
async def main():
    async with await connect_async(directory, device="cuda", guarantee=4) as worker:
        allocator = worker.allocator
        kept = [await allocator.alloc(1) for _ in range(4)]
        clones = [device_ids(int(slot)) for slot in kept]
        gpu.delay(0, 0.8)
        for clone in clones:
            cuda.call("cuMemcpyDtoDAsync", clone.data_ptr(), clone.data_ptr(), 8, 0)
        before, started = worker.messages, time.monotonic()
        for clone in clones:
            await allocator.free(clone)
        again = [await allocator.alloc(1) for _ in range(4)]
        say(time.monotonic() - started < 0.6, worker.messages - before, await allocator.alloc(1))
        gpu.synchronize()
        say([int(slot) for slot in again])
asyncio.run(main())
"""
    )
    assert gpu_pool.run(script) == ["True 0 None", "[1, 2, 3, 4]"]


def test_a_transfer_is_offered_and_a_close_is_over_when_the_gpu_is_done_and_the_loop_goes_on(
    gpu_pool: GpuPool,
) -> None:
    script = (
        PRELUDE
        + """
async def main():
    prefill, decode = await connect_async(directory, device="cuda"), await connect_async(directory, device="cuda")
    prefill.fence_streams([stream])
    slots = await prefill.allocator.alloc(2)
    gpu.delay(stream, 0.9)
    for slot in slots.tolist():
        gpu.fill(stream, prefill.states["temporal"][:, slot], 5)
    async with Ticks() as ticks:
        await prefill.transfer(slots, to=decode.session)
        say(await decode.accept(0.0))
        mine = await decode.accept(3.0)
        say(mine.tolist(), bytes_of(decode.states["temporal"][:, mine]))
        gpu.delay(stream, 0.9)
        started = time.monotonic()
        await prefill.close()
        say(time.monotonic() - started > 0.7)
        await decode.close()
    say(ticks.longest < 0.6)
asyncio.run(main())
"""
    )
    assert gpu_pool.run(script) == ["None", "[1, 2] {5}", "True", "True"]
