"""Ids that only the device knows: never waited for, checked when they come."""

from __future__ import annotations

import pytest
from gpu_pools import GpuPool

#: SGLang's tree keeps clones of slot tensors. Here they are made on the null stream, the current one, behind work.
CLONES = """
gpu = Gpu()
mutation = sys.argv[2] if len(sys.argv) > 2 else ""
if mutation == "waits for an id":
    from mambapool.client.device_ids import DeviceIds
    copy = DeviceIds.copy
    def copy_and_wait(self, source):
        places = copy(self, source)
        cuda.call("cuStreamSynchronize", 0)
        return places
    DeviceIds.copy = copy_and_wait
def clone(slot):
    "As torch's clone(): made by the device, in its own time."
    made = device_ids(0)
    cuda.call("cuMemcpyDtoDAsync", made.data_ptr(), slot.data_ptr(), 8, 0)
    return made
def late(seconds):
    gpu.delay(0, seconds)
def errors_of(call):
    try:
        call()
    except errors.InvalidSlots as error:
        return type(error).__name__, error.slots
"""


def _full_cache(gpu_pool: GpuPool, mutation: str, **options: int) -> list[str]:
    script = (
        CLONES
        + f"""
with connect(directory, device="cuda", **{options}) as worker:
    allocator = worker.allocator
    kept = [clone(allocator.alloc(1)) for _ in range(8)]
    gpu.synchronize()
    late(0.6)
    for tensor in kept:  # as they are behind what is queued
        cuda.call("cuMemcpyDtoDAsync", tensor.data_ptr(), tensor.data_ptr(), 8, 0)
    started, waited = time.monotonic(), lib.simSynchronisingCalls()
    handed_out = []
    for tensor in kept:
        assert allocator.alloc(1) is None
        allocator.free(tensor)
        cuda.call("cuMemsetD8Async", tensor.data_ptr(), 0, 8, 0)  # the engine uses its tensor for something else
        assert allocator.available_size() == 1
        handed_out.append(allocator.alloc(1))
    say(time.monotonic() - started < 0.4, lib.simSynchronisingCalls() - waited)
    gpu.synchronize()
    say(sorted(int(slot) for slot in handed_out), allocator.available_size())
    for slot in handed_out:
        allocator.free(slot)
    say(allocator.available_size(), sorted(allocator.alloc(8).tolist()))
"""
    )
    return gpu_pool.run(script, mutation)


@pytest.mark.parametrize("options", [{}, {"guarantee": 8}], ids=["list", "guarantee"])
def test_a_full_cache_of_unknown_ids_is_used_again_without_waiting_for_one(
    gpu_pool: GpuPool, options: dict[str, int]
) -> None:
    after = ["[1, 2, 3, 4, 5, 6, 7, 8] 0", "8 [1, 2, 3, 4, 5, 6, 7, 8]"]
    assert _full_cache(gpu_pool, "", **options) == ["True 0", *after]
    assert _full_cache(gpu_pool, "waits for an id", **options) == ["False 8", *after]


def test_an_unknown_id_leaves_the_process_when_it_is_known_and_its_fence_has_passed(gpu_pool: GpuPool) -> None:
    script = (
        CLONES
        + """
with connect(directory, device="cuda") as worker, connect(directory, device="cuda") as other:
    stream = gpu.stream()
    worker.fence_streams([stream])
    slots = worker.allocator.alloc(8)
    tensor = clone(worker.allocator._tensors.get(5))
    late(0.3)
    gpu.delay(stream, 0.6)
    started = time.monotonic()
    worker.allocator.free(tensor)
    until(lambda: other.allocator.available_size() == 1)
    say(time.monotonic() - started > 0.5, other.allocator.alloc(1).tolist())
"""
    )
    assert gpu_pool.run(script) == ["True [5]"]


@pytest.mark.parametrize("options", [{}, {"guarantee": 8}], ids=["list", "guarantee"])
def test_what_is_wrong_with_a_late_id_is_raised_at_a_later_call_and_costs_no_slot(
    gpu_pool: GpuPool, options: dict[str, int]
) -> None:
    script = (
        CLONES
        + f"""
with connect(directory, device="cuda", **{options}) as worker:
    allocator = worker.allocator
    slots = [allocator.alloc(1) for _ in range(8)]
    for wrong in (device_ids(0), device_ids(9), device_ids(-1), clone(slots[2])):
        if int(wrong.numel()) and wrong.data_ptr():
            gpu.synchronize()
        if int(wrong[0]) == 3:
            allocator.free(slots[2])  # and its clone is a second free of it
        allocator.free(wrong)
        found = []
        until(lambda: found.append(errors_of(allocator.available_size)) or found[-1])
        say(*found[-1], allocator.available_size())
    for slot in slots[:2] + slots[3:]:
        allocator.free(slot)
    say(allocator.available_size(), sorted(allocator.alloc(8).tolist()))
"""
    )
    assert gpu_pool.run(script) == [
        "ReservedSlot (0,) 0",
        "SlotOutOfRange (9,) 0",
        "SlotOutOfRange (-1,) 0",
        "DoubleFree (3,) 1",
        "8 [1, 2, 3, 4, 5, 6, 7, 8]",
    ]


def test_a_wrong_id_that_was_handed_out_again_is_named_and_its_tensor_frees_nothing(gpu_pool: GpuPool) -> None:
    script = (
        CLONES
        + """
with connect(directory, device="cuda", guarantee=8) as worker:
    allocator = worker.allocator
    slots = [allocator.alloc(1) for _ in range(8)]
    twice = [clone(slots[4]), clone(slots[4])]
    late(0.3)
    cuda.call("cuMemcpyDtoDAsync", twice[0].data_ptr(), twice[0].data_ptr(), 8, 0)
    for tensor in twice:
        allocator.free(tensor)
    first, second = allocator.alloc(1), allocator.alloc(1)
    found = []
    until(lambda: found.append(errors_of(allocator.available_size)) or found[-1])
    say(*found[-1])
    allocator.free(second)
    allocator.free(first)
    say(allocator.available_size(), int(allocator.alloc(1)))
"""
    )
    assert gpu_pool.run(script) == ["DoubleFree (5,)", "1 5"]


def test_every_form_of_an_index_frees_and_what_comes_back_is_on_the_device(gpu_pool: GpuPool) -> None:
    """A slot tensor, a clone on the device, a copy in the host's memory, a list, many at once (``cases.md`` 26)."""
    script = (
        CLONES
        + """
for device in ("cuda", "cuda:0", "cpu"):
    with connect(directory, device=device) as worker:
        allocator = worker.allocator
        on_device = cuda_tensors.is_on_device(allocator.alloc(1))
        allocator.free(torch.tensor([1]))
        forms = [
            lambda: allocator.alloc(1),
            lambda: torch.tensor(allocator.alloc(3).tolist(), dtype=torch.int32),
            lambda: allocator.alloc(2).tolist(),
            lambda: device_ids(*allocator.alloc(4).tolist()),
            lambda: allocator.alloc(8).reshape(-1),
        ]
        if device == "cpu":
            forms.append(lambda: torch.cat([device_ids(int(allocator.alloc(1))), allocator.alloc(2)]))
        for form in forms:
            until(lambda: allocator._table.free_count == 8)
            allocator.free(form())
            assert allocator.available_size() == 8
        until(lambda: allocator._table.free_count == 8)
        say(on_device)
        for bad in (device_ids(1, 2).view(1, 2), device_ids(1).view(torch.float64)):
            try:
                allocator.free(bad)
            except errors.BadIndexTensor:
                say("bad")
        allocator.free(device_ids(1)[:0])
        # On the other GPU: read, for of its order nothing is known here.
        other = device_ids(int(allocator.alloc(1)), ordinal=1)
        if device != "cpu":
            assert not allocator._is_ours(other) and allocator._is_ours(device_ids(1))
        allocator.free(other)
        assert allocator.available_size() == 8
"""
    )
    bad = ["bad", "bad"]
    assert gpu_pool.run(script) == ["True", *bad, "True", *bad, "False", *bad]


@pytest.mark.parametrize("options", ["{}", "{'guarantee': 8}"], ids=["list", "guarantee"])
def test_alloc_and_free_neither_wait_nor_allocate_on_the_device(gpu_pool: GpuPool, options: str) -> None:
    script = (
        CLONES
        + """
with connect(directory, device="cuda", **eval(sys.argv[2])) as worker:
    worker.fence_streams([gpu.stream()])
    allocator = worker.allocator
    kept = device_ids(*range(64))
    allocator.free(allocator.alloc(1))
    before = lib.simSynchronisingCalls(), lib.simCalls(b"cuMemAlloc")
    for _ in range(200):
        slot = allocator.alloc(1)
        allocator.free(slot)
    for number in range(1000):  # ids of no slot tensor, far more than there are cells
        slot = allocator.alloc(1)
        cuda.call("cuMemcpyDtoDAsync", kept[number % 64:].data_ptr(), slot.data_ptr(), 8, 0)
        allocator.free(kept[number % 64:][:1])
    say(lib.simSynchronisingCalls() - before[0], lib.simCalls(b"cuMemAlloc") - before[1])
    gpu.synchronize()
    until(lambda: not allocator._ids.unknown)
    say(allocator.available_size(), sorted(allocator.alloc(8).tolist()))
"""
    )
    assert gpu_pool.run(script, options, SIM_CUDA_LATENCY_US="20") == ["0 0", "8 [1, 2, 3, 4, 5, 6, 7, 8]"]


def test_a_clear_forgets_ids_that_are_not_known_yet(gpu_pool: GpuPool) -> None:
    script = (
        CLONES
        + """
for options in ({}, {"guarantee": 8}):
    with connect(directory, device="cuda", **options) as worker:
        allocator = worker.allocator
        kept = [clone(allocator.alloc(1)) for _ in range(6)]
        late(0.2)
        for tensor in kept[:4]:
            allocator.free(tensor)
        allocator.alloc(2), allocator.alloc(1)
        allocator.clear()
        say(allocator.available_size(), sorted(allocator.alloc(8).tolist()))
        gpu.synchronize()
        time.sleep(0.05)
        say(allocator.available_size())
"""
    )
    assert gpu_pool.run(script) == ["8 [1, 2, 3, 4, 5, 6, 7, 8]", "0"] * 2


def test_a_slot_that_came_by_a_transfer_is_given_back_by_its_clone(gpu_pool: GpuPool) -> None:
    script = (
        CLONES
        + """
with connect(directory, device="cuda") as giver, connect(directory, device="cuda", guarantee=4) as worker:
    slots = giver.allocator.alloc(2)
    giver.transfer(slots, to=worker.session)
    mine = worker.accept(2.0)
    late(0.2)
    for slot in (0, 1):
        tensor = device_ids(int(mine[slot]))
        if slot:
            cuda.call("cuMemcpyDtoDAsync", tensor.data_ptr(), tensor.data_ptr(), 8, 0)
        worker.allocator.free(tensor)
    until(lambda: giver.allocator.available_size() == 4)
    say(worker.allocator.available_size(), sorted(worker.allocator.alloc(4).tolist()))
"""
    )
    assert gpu_pool.run(script) == ["4 [1, 2, 3, 4]"]
