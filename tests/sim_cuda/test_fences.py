"""A slot that is freed goes to nobody else while work that was queued before can still write to it.

Each scenario runs as it is, and with the mutations that it has to notice: then the wrong byte shows.
"""

from __future__ import annotations

import pytest
from daemons import wait_until
from gpu_pools import GpuPool

#: Holds the pool and frees one slot while a stream still has a late write to it: argv[2] is a mutation, argv[3] how it
#: is fenced.
GIVER = """
from mambapool.client.fences import Fences
from mambapool.client.fenced_limbo import FencedLimbo as Limbo
mutation, how = sys.argv[2:]
if mutation == "current stream only":
    register = Fences.register
    Fences.register = lambda self, streams: register(self, streams[:1])
elif mutation == "no fence":
    pop = Limbo.pop_passed
    Limbo.pop_passed = lambda self, passed, *others: pop(self, 1 << 60, *others)
elif mutation == "event ignored":
    Limbo.events = lambda self: []
    pop_all = Limbo.pop_passed
    Limbo.pop_passed = lambda self, passed, is_over, is_known: pop_all(self, passed, lambda event: True, is_known)
gpu = Gpu()
schedule, forward, stray = gpu.stream(), gpu.stream(), gpu.stream()
worker = connect(directory, device="cuda")
if how != "whole context":
    worker.fence_streams([schedule, forward])
slot, *_ = worker.allocator.alloc(8).split(1)
rows = worker.states["temporal"][:, int(slot)]
writes = stray if how == "event" else forward
say("holds")
hear()
gpu.delay(writes, 0.6)
gpu.fill(writes, rows, 7)
after = None
if how == "event":
    after = [cuda.call("cuEventCreate", 2)]
    cuda.call("cuEventRecord", after[0], stray)
worker.allocator.free(slot, after=after)
say(worker.allocator.available_size())
hear()
gpu.synchronize()
say(bytes_of(rows))
hear()
"""

TAKER = """
with connect(directory, device="cuda") as worker:
    say("there")
    hear()
    slot = take_one(worker)
    hear()
"""


def _late_write(pool: GpuPool, mutation: str, how: str) -> tuple[float, str]:
    """After how long another process gets the slot, and what is in it when the late write is over."""
    giver, taker = pool.start(GIVER, mutation, how), pool.start(TAKER)
    assert [giver.hear(), taker.hear()] == ["holds", "there"]
    for child in (taker, giver):
        child.say("go on")
    assert giver.hear() == "1"
    after_s = float(taker.hear())
    giver.say("read")
    found = giver.hear()
    for child in (giver, taker):
        child.say("end")
        assert child.wait() == 0
    wait_until(lambda: pool.daemon.pool()["free"] == 8, "all is free again")
    return after_s, found


@pytest.mark.parametrize("how", ["registered streams", "whole context", "event"])
def test_the_next_owners_bytes_survive_a_write_that_was_queued_before(gpu_pool: GpuPool, how: str) -> None:
    after_s, found = _late_write(gpu_pool, "none", how)
    assert found == "{9}"
    assert 0.3 < after_s < 3.0
    mutations = {
        "registered streams": ["current stream only", "no fence"],
        "whole context": ["no fence"],
        "event": ["event ignored"],
    }
    for mutation in mutations[how]:
        _, found = _late_write(gpu_pool, mutation, how)
        assert found == "{7}", mutation


def test_a_full_pool_serves_its_client_from_its_own_limbo_and_others_not(gpu_pool: GpuPool) -> None:
    script = """
gpu = Gpu()
stream = gpu.stream()
with connect(directory, device="cuda") as worker, connect(directory, device="cuda") as other:
    worker.fence_streams([stream])
    allocator = worker.allocator
    slots = allocator.alloc(6)
    rest = other.allocator.alloc(2)
    gpu.delay(stream, 0.5)
    allocator.free(slots[:4].clone().tolist())
    say(allocator.available_size(), other.allocator.available_size(), allocator.free_slots.tolist())
    say(other.allocator.alloc(1), allocator.alloc(5))
    again = allocator.alloc(1), allocator.alloc(2)
    say(*[slot.tolist() for slot in again], allocator.available_size())
    allocator.alloc_group_begin(2)
    allocator.alloc_group_begin(1)
    say(allocator.alloc(1).tolist(), allocator.alloc(1))
    allocator.alloc_group_end()
    allocator.free(again[0])
    other.allocator.free(rest)
    until(lambda: other.allocator.available_size() == allocator.available_size() == 3)
    say(allocator.available_size(), sorted(allocator.alloc(3).tolist()))
"""
    assert gpu_pool.run(script) == ["4 0 [1, 2, 3, 4]", "None None", "[1] [2, 3] 1", "[4] None", "3 [1, 7, 8]"]


def test_an_alloc_takes_what_the_pool_has_and_the_rest_from_its_own_limbo(gpu_pool: GpuPool) -> None:
    script = """
gpu = Gpu()
stream = gpu.stream()
with connect(directory, device="cuda") as worker:
    worker.fence_streams([stream])
    gpu.delay(stream, 0.5)
    allocator = worker.allocator
    allocator.free(allocator.alloc(5))
    say(allocator.alloc(9), allocator.available_size(), allocator.alloc(7).tolist(), allocator.available_size())
    allocator.clear()
    say(allocator.available_size())
    allocator.alloc_group_begin(10)
    say(allocator.alloc(9))
    allocator.alloc_group_begin(10, partial=True)
    window = [int(allocator.alloc(1)) for _ in range(8)]
    say(window, allocator.alloc(1))
    allocator.free(torch.tensor(window[:2]))
    allocator.alloc_group_end()
    say(allocator.available_size(), allocator.alloc(2).tolist())
"""
    assert gpu_pool.run(script) == [
        "None 8 [6, 7, 8, 1, 2, 3, 4] 1",
        "8",
        "None",
        "[1, 2, 3, 4, 5, 6, 7, 8] None",
        "2 [1, 2]",
    ]


def test_frees_inside_a_window_are_behind_one_fence(gpu_pool: GpuPool) -> None:
    script = """
gpu = Gpu()
with connect(directory, device="cuda") as worker:
    worker.fence_streams([gpu.stream(), gpu.stream()])
    allocator = worker.allocator
    allocator.alloc_group_begin(6)
    slots = [allocator.alloc(1) for _ in range(5)]
    before = lib.simCalls(b"cuEventRecord"), lib.simSynchronisingCalls(), worker.messages
    for slot in slots:
        allocator.free(slot)
    allocator.alloc_group_end()
    say(lib.simCalls(b"cuEventRecord") - before[0])
    until(lambda: worker.messages == before[2] + 2)
    say(lib.simSynchronisingCalls() - before[1])
    until(lambda: allocator._table.free_count == 8)
"""
    assert gpu_pool.run(script) == ["2", "0"]


def test_a_clear_is_fenced_and_puts_the_list_in_order(gpu_pool: GpuPool) -> None:
    script = """
gpu = Gpu()
stream = gpu.stream()
with connect(directory, device="cuda") as worker, connect(directory, device="cuda") as other:
    worker.fence_streams([stream])
    slots = worker.allocator.alloc(5)
    worker.allocator.free(slots[[3]].tolist())
    worker.allocator.alloc_group_begin(2)
    worker.allocator.alloc(1)
    gpu.delay(stream, 0.4)
    worker.allocator.clear()
    say(worker.allocator.available_size(), other.allocator.alloc(7))
    until(lambda: other.allocator.available_size() == 8, 2.0)
    say(other.allocator.alloc(8).tolist())
    other.allocator.clear()
    until(lambda: worker.allocator.available_size() == 8, 2.0)
"""
    assert gpu_pool.run(script) == ["8 None", "[1, 2, 3, 4, 5, 6, 7, 8]"]


def test_a_transfer_is_offered_when_the_write_before_it_is_over(gpu_pool: GpuPool) -> None:
    script = """
gpu = Gpu()
stream = gpu.stream()
with connect(directory, device="cuda") as prefill, connect(directory, device="cuda") as decode:
    prefill.fence_streams([stream])
    slots = prefill.allocator.alloc(2)
    gpu.delay(stream, 0.5)
    for slot in slots.tolist():
        gpu.fill(stream, prefill.states["temporal"][:, slot], 5)
    started = time.monotonic()
    prefill.transfer(slots, to=decode.session)
    say(time.monotonic() - started < 0.2, decode.accept(0.0))
    try:
        prefill.allocator.free(slots)
    except errors.NotHolder as error:
        say(error.slots)
    mine = decode.accept(timeout=3.0)
    say(mine.tolist(), bytes_of(decode.states["temporal"][:, mine]))
    decode.allocator.free(mine)
    prefill.transfer(prefill.allocator.alloc(1), to=99)
    def refused():
        try:
            prefill.allocator.available_size()
        except errors.InvalidSlots as error:
            say(error.slots)
            return True
    until(refused)
    prefill.allocator.free([3])
"""
    assert gpu_pool.run(script) == ["True None", "(1, 2)", "[1, 2] {5}", "(3,)"]


def test_a_close_waits_a_second_and_the_slots_until_the_work_is_over(gpu_pool: GpuPool) -> None:
    script = """
gpu = Gpu()
stream = gpu.stream()
for seconds in (0.3, 1.8):
    with connect(directory, device="cuda") as worker:
        worker.fence_streams([stream])
        worker.allocator.free(worker.allocator.alloc(2))
        slots = worker.allocator.alloc(3)
        gpu.delay(stream, seconds)
        started = time.monotonic()
    took = time.monotonic() - started
    say(min(seconds, 1.0) * 0.9 < took < min(seconds, 1.0) + 0.4)
    with connect(directory) as other:
        held = other.allocator.available_size()
        until(lambda: other.allocator.available_size() == 8, 4.0)
        say(held, time.monotonic() - started > seconds * 0.9)
"""
    assert gpu_pool.run(script) == ["True", "8 True", "True", "5 True"]


def test_under_a_capture_nothing_is_queued_and_the_capture_stays_whole(gpu_pool: GpuPool) -> None:
    script = """
gpu = Gpu()
stream, other = gpu.stream(), gpu.stream()
asks = [b"cuStreamIsCapturing", b"cuEventQuery", b"cuCtxPushCurrent", b"cuCtxPopCurrent"]
asks.append(b"cuThreadExchangeStreamCaptureMode")
def not_asking():
    "Calls that do more than to ask how far the device is, which the driver allows a relaxed thread."
    return lib.simCalls(b"") - sum(map(lib.simCalls, asks))
mode = cuda.bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
for streams in ([stream, other], []):
    with connect(directory, device="cuda") as worker:
        worker.fence_streams(streams)
        allocator = worker.allocator
        slots = allocator.alloc(3)
        gpu.delay(other, 0.2)
        allocator.free([int(slots[0])])  # on its way while the capture begins
        unknown = device_ids(3)
        cuda.call("cuStreamBeginCapture", stream, mode)
        time.sleep(0.3)
        before = not_asking()
        allocator.free([int(slots[1])])
        allocator.free(unknown)
        allocator.alloc_group_begin(2)
        allocator.alloc_group_end()
        time.sleep(0.1)
        say(not_asking() - before)
        cuda.call("cuStreamEndCapture", stream)
        allocator.available_size()
        allocator.free(allocator.alloc(1))
        until(lambda: allocator._table.free_count == 8, 3.0)
        say(allocator._table.free_count == 8)
"""
    assert gpu_pool.run(script) == ["0", "True", "0", "True"]


def test_an_old_driver_asks_for_streams_before_anything_changes(gpu_pool: GpuPool) -> None:
    script = """
gpu = Gpu()
with connect(directory, device="cuda") as worker:
    slots = worker.allocator.alloc(2)
    try:
        worker.allocator.free(slots)
    except errors.CudaError as error:
        say("fence_streams" in str(error))
    worker.fence_streams([gpu.stream()])
    worker.allocator.free(slots)
    until(lambda: worker.allocator._table.free_count == 8)
"""
    assert gpu_pool.run(script, SIM_CUDA_VERSION="12040") == ["True"]


def test_a_gpu_that_fails_keeps_the_slots_of_its_process_until_that_ends(gpu_pool: GpuPool) -> None:
    script = """
worker = connect(directory, device="cuda")
worker.allocator.free(worker.allocator.alloc(2))
def failed():
    try:
        worker.allocator.available_size()
    except errors.CudaError as error:
        say("end it" in str(error))
        return True
until(failed)
hear()
"""
    child = gpu_pool.start(script, SIM_CUDA_FAULTS="cuEventQuery:700")
    assert child.hear() == "True"
    assert gpu_pool.daemon.pool()["free"] == 6
    child.say("end")
    child.wait()
    wait_until(lambda: gpu_pool.daemon.pool()["free"] == 8, "the dead process's slots are free")


def test_what_any_call_tells_of_an_earlier_kernel_is_said_and_stops_nobody_else(gpu_pool: GpuPool) -> None:
    """The driver tells it at the next call, whichever that is: from the thread that looks after every session, too."""
    script = """
import threading
gpu = Gpu()
stream = gpu.stream()
worker, other = connect(directory, device="cuda"), connect(directory, create_slots=8, pool="other")
worker.fence_streams([stream])
slots = worker.allocator.alloc(2)
gpu.delay(stream, 0.3)
os.environ["SIM_CUDA_FAULTS"] = "cuCtxPushCurrent:700"
worker.fences._issued += 1  # a fence that was on its way: nothing of this thread's is asked
worker.fences._recorded += 1
worker.fences._in_flight.append(type("Recorded", (), {"number": worker.fences._issued, "left": []})())
def failed():
    try:
        worker.allocator.available_size()
    except errors.CudaError as error:
        say("end it" in str(error))
        return True
until(failed)
ticks = []
tick = other._transport.tick
other._transport.tick = lambda: (ticks.append(1), tick())
until(lambda: len(ticks) > 2)
other.allocator.free(other.allocator.alloc(8))
other.close()
say("other goes on")
os.environ["SIM_CUDA_FAULTS"] = ""
"""
    assert gpu_pool.run(script) == ["True", "other goes on"]


def test_streams_that_cannot_be_fenced_are_refused_when_they_are_named(gpu_pool: GpuPool) -> None:
    script = """
gpu, elsewhere = Gpu(0), Gpu(1)
foreign = elsewhere.stream()
gpu = Gpu(0)
stream = gpu.stream()
with connect(directory, device="cuda") as worker:
    worker.fence_streams([stream])
    for wrong in (foreign, 0xdead0):
        try:
            worker.fence_streams([stream, wrong])
        except errors.ConfigError as error:
            say(str(error).split(", ")[0].split(" (")[0].removeprefix(repr(wrong)))
    slots = worker.allocator.alloc(2)
    try:
        worker.allocator.free(slots, after=[type("Event", (), {"cuda_event": 0})()])
    except ValueError as error:
        say("never recorded" in str(error))
    say(worker.allocator.held())
    gpu.delay(stream, 0.2)
    worker.allocator.free(slots)
    say(worker.allocator._table.free_count)
    until(lambda: worker.allocator._table.free_count == 8)
"""
    assert gpu_pool.run(script) == [
        " is of another GPU or context than this session's",
        " is no stream that can be fenced",
        "True",
        "[1, 2]",
        "6",
    ]


def test_a_null_stream_is_fenced_when_nobody_captures_a_stream_that_it_waits_for(gpu_pool: GpuPool) -> None:
    script = """
gpu = Gpu()
blocking = cuda.call("cuStreamCreate", 0)
with connect(directory, device="cuda") as worker:
    worker.fence_streams([0])
    slots = worker.allocator.alloc(2)
    cuda.call("cuStreamBeginCapture", blocking, cuda.bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    def free_elsewhere():
        worker.allocator.free(slots)
    import threading
    thread = threading.Thread(target=free_elsewhere)
    thread.start()
    thread.join()
    time.sleep(0.05)
    say(worker.allocator._table.free_count, worker.fences.failed)
    cuda.call("cuStreamEndCapture", blocking)
    until(lambda: worker.allocator._table.free_count == 8)
"""
    assert gpu_pool.run(script) == ["6 None"]


def test_sessions_that_come_and_go_leave_nothing_at_the_driver(gpu_pool: GpuPool) -> None:
    script = """
import gc
gpu = Gpu()
def open_ones():
    gc.collect()
    return [lib.simCalls(made) - lib.simCalls(gone) for made, gone in (
        (b"cuMemHostAlloc", b"cuMemFreeHost"), (b"cuEventCreate", b"cuEventDestroy"), (b"cuMemAlloc", b"cuMemFree"))]
for _ in range(10):
    with connect(directory, device="cuda") as worker:
        worker.fence_streams([gpu.stream()])
        worker.allocator.free(worker.allocator.alloc(2))
        worker.allocator.free(worker.allocator.alloc(2).clone())
        worker.allocator.free(device_ids(int(worker.allocator.alloc(1))))
        until(lambda: worker.allocator._table.free_count == 8)
del worker
say(lib.simCalls(b"cuMemHostAlloc"), lib.simCalls(b"cuEventCreate") > 10)
until(lambda: open_ones() == [0, 0, 0])
"""
    assert gpu_pool.run(script) == ["10 True"]


def test_slot_tensors_have_their_values_when_a_session_begins(gpu_pool: GpuPool) -> None:
    """A copy to the device returns before it is done, and no stream of torch's waits for it."""
    script = """
with connect(directory, device="cuda") as worker:
    say(worker.allocator.alloc(1).tolist())
"""
    assert gpu_pool.run(script, SIM_CUDA_LATENCY_US="300000") == ["[1]"]


def test_how_far_the_fences_are_is_a_number_that_grows(gpu_pool: GpuPool) -> None:
    script = """
gpu = Gpu()
stream = gpu.stream()
with connect(directory, device="cuda") as worker:
    worker.fence_streams([stream])
    fences = worker.fences
    first = fences.issue()
    until(lambda: fences.passed == first)
    gpu.delay(stream, 0.2)
    second = fences.issue()
    gpu.delay(stream, 0.2)
    third = fences.issue()
    say(first < second < third, fences.passed == first)
    until(lambda: fences.passed >= second)
    say(fences.passed == second)
    until(lambda: fences.passed == third)
"""
    assert gpu_pool.run(script) == ["True True", "True"]
