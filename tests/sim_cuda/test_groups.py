"""Ranks of a group on GPUs of their own: what one frees is nobody else's before every rank's GPU is done with it."""

from __future__ import annotations

import itertools

import pytest
from daemons import wait_until
from gpu_pools import GpuPool
from processes import Child

_names = itertools.count(1)


#: ``argv``: the group's name, the rank, a mutation, options of connect. ``write`` queues a late write.
RANK = """
from mambapool.client import group as of_group
from mambapool.client.fences import Fences
from mambapool.client.rank_fences import RankFences
from mambapool.pool.group_page import GroupPage
group, rank, mutation, options = sys.argv[2], int(sys.argv[3]), sys.argv[4], eval(sys.argv[5])
if mutation == "no fence":
    RankFences._is_over = lambda self, noted: True
elif mutation == "rank 0's fence only":
    GroupPage.passed = lambda self: min(self.slowest()[0], self.items[self._ranks[0] + 3])
elif mutation == "no limbo":
    of_group.Group.passed = lambda self: self.position
elif mutation == "current stream only":
    register = Fences.register
    Fences.register = lambda self, streams: register(self, streams[:1])
elif mutation == "event ignored":
    RankFences.after = lambda self, events: None
gpu = Gpu(rank)
schedule, forward, stray = gpu.stream(), gpu.stream(), gpu.stream()
def join():
    return connect(directory, device="cuda", group=group, rank=rank, world_size=2, timeout=10.0, **options)
def write(stream, slot, value=7, seconds=0.6):
    "After a while, to this rank's shard."
    gpu.delay(stream, seconds)
    gpu.fill(stream, worker.states["temporal"][:, slot], value)
def event_on(stream):
    event = cuda.call("cuEventCreate", 2)
    cuda.call("cuEventRecord", event, stream)
    return event
"""

#: Another engine, on rank 1's shard: takes what it can get, and leaves its bytes there.
RIVAL = """
with connect(directory, device="cuda", rank=1) as worker:
    say("there")
    hear()
    slot = take_one(worker)
    hear()
    say(bytes_of(worker.states["temporal"][:, slot]))
"""


def ranks_of(gpu_pool: GpuPool, script: str, mutation: str = "", options: str = "{}") -> list[Child]:
    """Both ranks of a group of their own."""
    name = f"engine-{next(_names)}"
    return [gpu_pool.start(RANK + script, name, rank, mutation, options) for rank in (0, 1)]


def heard(children: list[Child]) -> list[str]:
    return [child.hear() for child in children]


def ended(children: list[Child]) -> list[int]:
    for child in children:
        child.say("end")
    return [child.wait() for child in children]


#: Rank 1's GPU still writes to the slot when both have freed it. ``options["how"]``: where its write is queued.
FREE = """
how = options.pop("how")
worker = join()
if how != "whole context":
    worker.fence_streams([schedule, forward])
slots = worker.allocator.alloc(8)
say("holds")
hear()
if rank:
    write(stray if how == "event" else forward, int(slots[0]))
worker.allocator.free(slots[:1].tolist(), after=[event_on(stray)] if how == "event" else None)
say(worker.allocator.available_size())
hear()
gpu.synchronize()
say("done")
hear()
worker.close()
"""


def late_write(gpu_pool: GpuPool, mutation: str, how: str) -> tuple[float, str]:
    """After how long the rival gets the slot, and what is in it when rank 1's write is over."""
    rival = gpu_pool.start(RIVAL)
    rival.hear()
    ranks = ranks_of(gpu_pool, FREE, mutation, f"{{'how': {how!r}}}")
    assert heard(ranks) == ["holds"] * 2
    rival.say("take")
    for rank in ranks:
        rank.say("free")
    assert heard(ranks) == ["1", "1"]
    after_s = float(rival.hear())
    for rank in ranks:
        rank.say("finish")
    assert heard(ranks) == ["done"] * 2
    rival.say("look")
    found = rival.hear()
    assert rival.wait() == 0
    assert ended(ranks) == [0, 0]
    wait_until(lambda: gpu_pool.daemon.pool()["free"] == 8, "all is free again")
    return after_s, found


@pytest.mark.parametrize(
    ("how", "mutations"),
    [
        ("registered streams", ["no fence", "rank 0's fence only", "no limbo", "current stream only"]),
        ("whole context", ["no fence"]),
        ("event", ["event ignored"]),
    ],
    ids=["registered streams", "whole context", "event"],
)
def test_a_slot_leaves_the_group_when_every_ranks_gpu_is_done_with_it(
    gpu_pool: GpuPool, how: str, mutations: list[str]
) -> None:
    after_s, found = late_write(gpu_pool, "", how)
    assert found == "{9}"
    assert 0.3 < after_s < 3.0
    for mutation in mutations:
        assert late_write(gpu_pool, mutation, how)[1] == "{7}", mutation


#: Rank 1 makes its calls late: rank 0 has freed the slot, and rank 1 queues a write to it afterwards.
SLOW = """
worker = join()
worker.fence_streams([schedule, forward])
allocator = worker.allocator
slots = allocator.alloc(8)
say("holds")
if rank:
    hear()
    write(forward, int(slots[0]), seconds=0.3)
allocator.free(slots[:1].tolist())
if not rank:
    say("freed")
    hear()
allocator.alloc_group_begin(1)
again = allocator.alloc(1)
say(again.tolist())
allocator.free(again)
allocator.alloc_group_end()
hear()
gpu.synchronize()
worker.close()
"""


@pytest.mark.parametrize("mutation", ["", "no limbo"])
def test_a_rank_that_is_late_and_its_gpu_later_still_are_both_waited_for(gpu_pool: GpuPool, mutation: str) -> None:
    rival = gpu_pool.start(RIVAL)
    rival.hear()
    ranks = ranks_of(gpu_pool, SLOW, mutation)
    assert heard(ranks) == ["holds"] * 2
    assert ranks[0].hear() == "freed"
    rival.say("take")
    if mutation:
        rival.hear()  # has it, while rank 1 has not even made the call
        return
    ranks[1].say("go on")
    # The group has it again, at once: its own order sees to that. Then it is free, and the rival's.
    ranks[0].say("go on")
    assert heard(ranks) == ["[1]", "[1]"]
    rival.hear()
    for rank in ranks:
        rank.say("end")
    assert [rank.wait() for rank in ranks] == [0, 0]
    rival.say("look")
    assert rival.hear() == "{9}"


GIVER = """
worker = connect(directory)
worker.transfer(worker.allocator.alloc(6)[:1], to=int(sys.argv[2]))
hear()
"""

TRANSFERRED = """
worker = join()
worker.fence_streams([schedule, forward])
say(worker.session)
mine = worker.accept(5.0)
say(mine.tolist())
hear()
if rank:
    write(forward, int(mine[0]))
worker.allocator.free(device_ids(*mine.tolist(), ordinal=rank))
say(worker.allocator.available_size())
hear()
gpu.synchronize()
worker.close()
"""


@pytest.mark.parametrize("mutation", ["", "no fence"])
def test_of_a_guarantee_what_came_by_a_transfer_leaves_it_behind_every_ranks_fence(
    gpu_pool: GpuPool, mutation: str
) -> None:
    rival = gpu_pool.start(RIVAL)
    rival.hear()
    ranks = ranks_of(gpu_pool, TRANSFERRED, mutation, "{'guarantee': 2}")
    session = heard(ranks)[0]
    giver = gpu_pool.start(GIVER, session)
    assert heard(ranks) == ["[3]", "[3]"]
    rival.say("take")
    for rank in ranks:
        rank.say("free")
    assert heard(ranks) == ["2", "2"]
    after_s = float(rival.hear())
    assert ended(ranks) == [0, 0]
    rival.say("look")
    assert rival.hear() == ("{7}" if mutation else "{9}")
    assert mutation or after_s > 0.3
    giver.say("end")
    assert giver.wait() == 0


CLONES = """
def clone(slot):
    "As torch's clone(): made by the device, in its own time."
    made = device_ids(0, ordinal=rank)
    cuda.call("cuMemcpyDtoDAsync", made.data_ptr(), slot.data_ptr(), 8, 0)
    return made
worker = join()
allocator = worker.allocator
"""


def test_unknown_ids_are_waited_for_by_no_rank_and_the_lists_stay_the_same(gpu_pool: GpuPool) -> None:
    script = (
        CLONES
        + """
clones = [clone(allocator.alloc(1)) for _ in range(4)]  # not dropped: to free memory is a call that waits
kept = list(clones)
gpu.synchronize()
gpu.delay(0, 0.8 * rank)
for tensor in kept:  # on rank 1 they are known late
    cuda.call("cuMemcpyDtoDAsync", tensor.data_ptr(), tensor.data_ptr(), 8, 0)
started, waited = time.monotonic(), lib.simSynchronisingCalls()
again = []
for _ in range(3):
    for number, tensor in enumerate(kept):
        assert allocator.alloc(1) is None
        allocator.free(tensor)
        again.append(allocator.alloc(1))
        kept[number] = again[-1]
say(time.monotonic() - started < 0.6, lib.simSynchronisingCalls() - waited)
gpu.synchronize()
say([int(slot) for slot in again])
for slot in kept:
    allocator.free(slot)
say(allocator.available_size(), allocator.alloc(4).tolist())
worker.close()
"""
    )
    said = [rank.rest() for rank in ranks_of(gpu_pool, script, options="{'guarantee': 4}")]
    assert said[0] == said[1]
    assert said[0] == ["True 0", f"{[1, 2, 3, 4] * 3}", "4 [1, 2, 3, 4]"]


def test_an_id_that_turns_out_wrong_ends_the_group_and_costs_nobody_else_a_slot(gpu_pool: GpuPool) -> None:
    script = (
        CLONES
        + """
slot = allocator.alloc(1)
twice = clone(slot)
gpu.synchronize()
allocator.free(slot)
allocator.free(twice)
def broken():
    try:
        allocator.available_size()
    except errors.GroupBroken as error:
        say(error)
        return True
until(broken)
hear()
worker.close()
"""
    )
    ranks = ranks_of(gpu_pool, script, options="{'guarantee': 4}")
    for rank, said in enumerate(heard(ranks)):
        assert f"rank {rank} cannot stay in step: slot 1 was freed twice" in said
    assert ended(ranks) == [0, 0]
    wait_until(lambda: gpu_pool.daemon.pool()["free"] == 8, "all is free again")


def test_without_a_guarantee_ids_are_read_and_slot_tensors_and_lists_are_not_waited_for(gpu_pool: GpuPool) -> None:
    script = (
        CLONES
        + """
worker.fence_streams([schedule])
allocator.free(allocator.alloc(1))
slots = allocator.alloc(4)
say(slots.tolist(), cuda_tensors.is_on_device(allocator.alloc(1)))
waited = lib.simSynchronisingCalls()
allocator.free(slots[:2].tolist())
allocator.alloc_group_begin(2)
for _ in range(2):
    allocator.free(allocator.alloc(1))
allocator.alloc_group_end()
allocator.free([6])
say(lib.simSynchronisingCalls() - waited)
allocator.free(device_ids(*slots[2:].tolist(), ordinal=rank))
until(lambda: allocator._table.free_count == 8)
say(allocator.available_size())
allocator.clear()
worker.close()
"""
    )
    said = [rank.rest() for rank in ranks_of(gpu_pool, script)]
    assert said[0] == said[1]
    assert said[0][1:] == ["0", "8"]
    assert said[0][0].endswith("True")


def test_a_groups_transfer_is_offered_when_every_ranks_write_is_over(gpu_pool: GpuPool) -> None:
    script = """
worker = join()
worker.fence_streams([schedule, forward])
slots = worker.allocator.alloc(2)
if rank:
    write(forward, int(slots[0]), value=5, seconds=0.4)
say("holds")
worker.transfer(slots, to=int(hear()))
say("offered")
hear()
worker.close()
"""
    ranks = ranks_of(gpu_pool, script)
    receiver = gpu_pool.start("""
with connect(directory, rank=1) as worker:
    say(worker.session)
    mine = worker.accept(5.0)
    say(mine.tolist(), bytes_of(worker.states["temporal"][:, mine[:1]]))
""")
    session = receiver.hear()
    assert heard(ranks) == ["holds"] * 2
    for rank in ranks:
        rank.say(session)
    assert heard(ranks) == ["offered"] * 2
    assert receiver.hear() == "[1, 2] {5}"
    assert ended(ranks) == [0, 0]


OFFERED_BACK = """
from mambapool.pool.errors import InvalidSlots
def tried(call):
    try:
        return call()
    except InvalidSlots as error:
        return [type(error).__name__, error.slots]
worker = join()
say(worker.session)
mine = worker.accept(5.0)
worker.transfer(mine, to=int(hear()))
say("offered")
ids = mine.tolist()
for call in (
    lambda: worker.allocator.free(ids),
    lambda: worker.allocator.free(device_ids(*ids, ordinal=rank)),
    lambda: worker.allocator.free(mine),
    lambda: worker.allocator.available_size(),
):
    hear()
    say(tried(call))
hear()
worker.close()
"""


@pytest.mark.parametrize("guarantee", [0, 2])
def test_a_free_of_what_was_on_offer_is_rank_0s_to_decide(gpu_pool: GpuPool, guarantee: int) -> None:
    ranks = ranks_of(gpu_pool, OFFERED_BACK, options=f"{{'guarantee': {guarantee}}}")
    session = heard(ranks)[0]
    giver = gpu_pool.start(
        """
worker = connect(directory)
worker.transfer(worker.allocator.alloc(2), to=int(sys.argv[2]))
hear()
""",
        session,
    )
    receiver = gpu_pool.start("worker = connect(directory)\nsay(worker.session)\nhear()")
    number = receiver.hear()
    for rank in ranks:
        rank.say(number)
    assert heard(ranks) == ["offered"] * 2
    # Rank 0 makes each call before the offer ends, the other one after that.
    for _ in range(2):
        ranks[0].say("free")
        assert ranks[0].hear().startswith("['NotHolder'")
    receiver.say("end")
    assert receiver.wait() == 0
    wait_until(lambda: gpu_pool.daemon.pool()["offered"] == 0, "the offer has ended")
    for _ in range(2):
        ranks[1].say("free")
        assert ranks[1].hear().startswith("['NotHolder'")
    for rank in ranks:
        rank.say("free")
    assert heard(ranks) == ["None", "None"]
    for rank in ranks:
        rank.say("count")
    counted = heard(ranks)
    assert counted[0] == counted[1]
    assert ended(ranks) == [0, 0]
    giver.say("end")
    assert giver.wait() == 0


def test_a_rank_that_closes_while_its_gpu_works_keeps_the_groups_slots(gpu_pool: GpuPool) -> None:
    script = """
worker = join()
worker.fence_streams([schedule, forward])
slots = worker.allocator.alloc(8)
if rank:
    write(forward, int(slots[0]), seconds=1.6)
started = time.monotonic()
worker.close()
say(time.monotonic() - started < 1.5)
hear()
"""
    ranks = ranks_of(gpu_pool, script)
    assert heard(ranks) == ["True"] * 2
    assert gpu_pool.daemon.pool()["free"] == 0
    wait_until(lambda: gpu_pool.daemon.pool()["free"] == 8, "its work is over")
    assert ended(ranks) == [0, 0]


@pytest.mark.parametrize("seconds", [0.3, 1.4])
def test_what_was_freed_before_a_rank_left_leaves_the_group_when_its_gpu_is_done(
    gpu_pool: GpuPool, seconds: float
) -> None:
    """Within the second that a close waits, and after it."""
    script = f"""
worker = join()
worker.fence_streams([schedule, forward])
slots = worker.allocator.alloc(8)
if rank:
    write(forward, int(slots[0]), seconds={seconds})
started = time.monotonic()
worker.allocator.free(slots.tolist())
if rank:
    worker.close()
else:
    until(lambda: worker.allocator._table.free_count == 8)
    say(time.monotonic() - started > {seconds} * 0.8)
hear()
worker.close()
"""
    ranks = ranks_of(gpu_pool, script)
    assert ranks[0].hear() == "True"
    assert ended(ranks) == [0, 0]


def test_the_last_rank_that_dies_holds_the_groups_slots_for_the_quarantine(gpu_pool: GpuPool) -> None:
    script = """
worker = join()
worker.allocator.alloc(8)
say("holds")
hear()
worker.close()
"""
    ranks = ranks_of(gpu_pool, script)
    assert heard(ranks) == ["holds"] * 2
    ranks[0].say("close")
    assert ranks[0].wait() == 0
    ranks[1].close()  # SIGKILL; it holds no slot by itself
    seen = wait_until(lambda: _states(gpu_pool).get(1) == "gone" and gpu_pool.daemon.pool(), "its death is seen")
    assert seen["free"] == 0
    wait_until(lambda: gpu_pool.daemon.pool()["free"] == 8, "the quarantine is over")


def _states(gpu_pool: GpuPool) -> dict[int, str]:
    return {holder["rank"]: holder["state"] for holder in gpu_pool.daemon.pool()["holders"]}
