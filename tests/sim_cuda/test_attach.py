"""Workers that map a keeper's GPU memory, on the simulated driver."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from daemons import SMALL_STATE, wait_until
from gpu_pools import PRELUDE, GpuPool, GpuPools
from processes import TORN_DOWN, Child
from simulated_gpu import SimulatedMachine

from mambapool.client.operators import ask_audit
from mambapool.service.audited import AuditedPool

REFUSED = """
try:
    connect(directory, device=sys.argv[2], timeout=3.0)
except errors.MambaPoolError as error:
    say(type(error).__name__, error)
"""

BY_ORDINAL = """
from mambapool.pool import cuda_attach
cuda_attach.device_with = lambda uuid, what: cuda.visible_devices()[0]
"""


def test_four_processes_map_the_same_states_without_a_copy(gpu_pool: GpuPool) -> None:
    script = """
with connect(directory, device="cuda") as worker:
    slot = worker.allocator.alloc(1)
    number = int(slot)
    worker.states["temporal"][:, slot] = float(number)
    say(number, worker.states["conv"].dtype, tuple(worker.states["conv"].shape), cuda_tensors.is_on_device(slot))
    hear()
    say(worker.states["temporal"][:, 1:5].amax(dim=(0, 2, 3, 4)).tolist(), lib.simOpenMappings())
    hear()
"""
    workers = [gpu_pool.start(script) for _ in range(4)]
    said = sorted(worker.hear() for worker in workers)
    assert said == [f"{slot} torch.bfloat16 (2, 9, 6, 3) True" for slot in (1, 2, 3, 4)]
    for worker in workers:
        worker.say("read")
    assert {worker.hear() for worker in workers} == {"[1.0, 2.0, 3.0, 4.0] 1"}
    for worker in workers:
        worker.say("end")
        assert worker.wait() == 0


def test_sessions_of_one_process_open_a_shard_once_and_close_it_with_the_last_tensor(gpu_pool: GpuPool) -> None:
    script = """
first, second = connect(directory), connect(directory)
view = second.states["conv"][:, 3:5]
say(lib.simOpenMappings(), lib.simCalls(b"cuIpcOpenMemHandle"))
first.close()
second.close()
del first, second
say(lib.simOpenMappings(), bytes_of(view))
view = view[0]
say(lib.simOpenMappings(), lib.simCalls(b"cuIpcCloseMemHandle"))
del view
until(lambda: lib.simOpenMappings() == 0)
say(lib.simCalls(b"cuIpcCloseMemHandle"))
with connect(directory) as again:
    say(bytes_of(again.states["conv"]), lib.simOpenMappings())
"""
    assert gpu_pool.run(script) == ["1 1", "1 {0}", "1 0", "1", "{0} 1"]


def test_dropping_the_last_tensor_waits_for_nothing(gpu_pool: GpuPool) -> None:
    script = """
gpu = Gpu()
worker = connect(directory)
view = worker.states["conv"]
worker.close(); del worker
gpu.delay(gpu.stream(), 1.0)
started = time.monotonic()
del view
with connect(directory, create_slots=4, pool="other") as other:
    other.allocator.free(other.allocator.alloc(2))
say(time.monotonic() - started < 0.5, lib.simOpenMappings())
until(lambda: lib.simOpenMappings() == 0)
say(time.monotonic() - started > 0.9)
"""
    assert gpu_pool.run(script) == ["True 1", "True"]


def test_the_device_is_found_by_its_uuid_wherever_it_is_in_the_workers_order(gpu_pools: GpuPools) -> None:
    second = gpu_pools.start(CUDA_VISIBLE_DEVICES="1")
    script = """
with connect(directory, device="cuda") as worker:
    say(worker.pool.ordinal, bytes_of(worker.states["conv"]), lib.simAllocated(1) > 0, lib.simAllocated(0))
"""
    assert second.run(script, CUDA_VISIBLE_DEVICES="1") == ["0 {0} True 0"]
    assert second.run(script, CUDA_VISIBLE_DEVICES="0,1") == ["1 {0} True 0"]
    assert second.run(script, CUDA_VISIBLE_DEVICES="1,0") == ["0 {0} True 0"]
    # The mutation: the driver refuses it, as it does where devices have no peer access.
    (said,) = second.run(BY_ORDINAL + REFUSED, "cpu", CUDA_VISIBLE_DEVICES="0,1")
    assert "cannot be mapped" in said


@pytest.mark.parametrize(
    ("device", "settings", "words"),
    [
        ("cpu", {"CUDA_VISIBLE_DEVICES": "1"}, ["CudaError", "does not see", "GPU-22", "CUDA_VISIBLE_DEVICES=1"]),
        ("cpu", {"SIM_CUDA_SAME_PID": "1"}, ["CudaError", "201", "one pid in different namespaces", "doctor"]),
        ("cpu", {"SIM_CUDA_FAULTS": "cuIpcOpenMemHandle:801"}, ["CudaError", "has no CUDA IPC", "Tegra"]),
        ("cuda:1", {}, ["ConfigError", "'cuda:1' is GPU-22", "the shard is on GPU-11", "pass 'cuda:0'"]),
        ("cuda:2", {}, ["ConfigError", "'cuda:2' is not there", "GPU-11", "GPU-22"]),
        (
            "cuda",
            {"CUDA_VISIBLE_DEVICES": "-1"},
            ["ConfigError", "'cuda' cannot be used", "CUDA_VISIBLE_DEVICES=-1"],
        ),
    ],
)
def test_what_keeps_a_worker_from_mapping_is_named_and_leaves_no_session(
    gpu_pool: GpuPool, device: str, settings: dict[str, str], words: list[str]
) -> None:
    (said,) = gpu_pool.run(REFUSED, device, **settings)
    assert [word for word in words if word not in said] == [], said
    wait_until(lambda: gpu_pool.daemon.pool()["holders"] == [], "its session has ended")


#: Goes into namespaces of its own, as a container does, and attaches from there.
ELSEWHERE = """
libc = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS, NEW_IPC, NEW_PIDS, PRIVATE = 0x20000, 0x8000000, 0x20000000, 0x44000
flags = {"PID": NEW_PIDS | NEW_MOUNTS, "IPC": NEW_IPC, "PID and IPC": NEW_PIDS | NEW_MOUNTS | NEW_IPC}[sys.argv[2]]
def must(done):
    if done:
        say("no namespaces here:", os.strerror(ctypes.get_errno()))
        os._exit(0)
must(libc.unshare(flags))
if flags & NEW_PIDS:
    if child := os.fork():
        os.waitpid(child, 0)
        os._exit(0)
    must(libc.mount(b"none", b"/", None, PRIVATE, None))
    must(libc.mount(b"proc", b"/proc", b"proc", 0, None))
try:
    worker = connect(directory, timeout=5.0)
    say("attached", bytes_of(worker.states["conv"]))
except errors.CudaError as error:
    say(error)
os._exit(0)
"""


@pytest.mark.parametrize("which", ["PID", "IPC", "PID and IPC"])
def test_a_worker_in_another_namespace_is_told_which_and_gets_no_copy(gpu_pool: GpuPool, which: str) -> None:
    """``cases.md`` 49. What it has attached to ends with it."""
    (said,) = gpu_pool.run(ELSEWHERE, which)
    if said.startswith("no namespaces"):
        pytest.skip(said)
    assert f"another {which} namespace" in said
    assert "--pid=host --ipc=host" in said
    wait_until(lambda: gpu_pool.daemon.pool()["holders"] == [], "its session has ended")


EXPANDABLE = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True")


def test_settings_of_torchs_allocator_change_nothing_that_is_shared(
    gpu_pools: GpuPools, gpu_pool: GpuPool
) -> None:
    """``cases.md`` 47: of the daemon, of a client, of both; also for a process that may not gain privileges."""
    script = """
if sys.argv[2] == "confined":
    assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
with connect(directory, device="cuda") as worker:
    before = float(worker.states["temporal"][0, 3].max())
    worker.states["temporal"][:, 3] = before + 1.0
    say(before)
"""
    set_by_all: Any = EXPANDABLE
    expandable = gpu_pools.start(**set_by_all)
    for pool, settings in ((expandable, {}), (expandable, EXPANDABLE), (gpu_pool, EXPANDABLE)):
        pool.run('with connect(directory) as worker: worker.states["temporal"][:] = 0.0')
        said = [pool.run(script, how, **settings) for how in ("plain", "confined", "plain")]
        assert said == [["0.0"], ["1.0"], ["2.0"]]


def test_a_process_that_ends_with_everything_open_ends_in_order(gpu_pool: GpuPool) -> None:
    """Its modules are torn down while tensors, fences and ids are under way."""
    script = """
gpu = Gpu()
worker = connect(directory, device="cuda")
gpu.delay(0, 0.1)
slot = worker.allocator.alloc(1)
worker.allocator.free(device_ids(int(slot)))
kept = worker.states["temporal"][:, 2:4]
again = worker.allocator.alloc(2)
"""
    child = gpu_pool.start(script, **TORN_DOWN)
    assert child.rest() == []
    assert child.stderr == ""


def test_a_keepers_death_is_pool_lost_and_never_old_memory(gpu_pools: GpuPools) -> None:
    """What is mapped stays, or is gone: the driver may do either (``cases.md`` 46)."""
    pool = gpu_pools.start(name="run", SIM_CUDA_HANDLES="repeat")
    script = """
worker = connect(directory, device="cuda")
slots = worker.allocator.alloc(3)
kept = worker.states["temporal"]
kept[:, slots] = 1.0
say("holds")
hear()
try:
    while True:
        worker.allocator.alloc(1)
        time.sleep(0.01)
except errors.PoolLost as error:
    say("lost")
for call in (lambda: worker.states, lambda: worker.allocator.alloc(1)):
    try:
        call()
    except errors.PoolLost as error:
        say("lost")
say("ready")
hear()
# The old mapping is open still, and the new memory's handle has the same bytes.
with connect(directory, device="cuda") as again:
    say(bytes_of(again.states["temporal"]), lib.simOpenMappings())
    try:
        again.allocator.free(slots.tolist())
    except errors.DoubleFree as error:  # nobody has those of the old memory
        say(error.slots == tuple(slots.tolist()))
    hear()
    say(float(again.states["temporal"][0, 1].flatten()[0]))
"""
    workers = [
        pool.start(script, SIM_CUDA_EXPORTER_GONE=gone, SIM_CUDA_HANDLES="repeat") for gone in ("pin", "unmap")
    ]
    assert [worker.hear() for worker in workers] == ["holds"] * 2
    keeper = pool.daemon.directory.keeper_lock("default", 0).read_text().strip()
    os.kill(int(keeper), 9)
    for worker in workers:
        worker.say("go on")
        assert [worker.hear() for _ in range(4)] == ["lost", "lost", "lost", "ready"]
    pool.daemon.process.wait(10)
    anew = gpu_pools.start(name="run", SIM_CUDA_HANDLES="repeat")
    for worker in workers:
        worker.say("again")
        assert [worker.hear(), worker.hear()] == ["{0} 2", "True"]
    anew.run('with connect(directory) as w: w.states["temporal"][:, 1] = 5.0', SIM_CUDA_HANDLES="repeat")
    for worker in workers:
        worker.say("read")
        assert worker.hear() == "5.0"


def test_a_mapping_that_is_found_by_its_handle_shows_old_memory(
    machine: SimulatedMachine, runtime_dir: Path
) -> None:
    """The mutation: what the test above would see if mappings were told apart by handle bytes."""
    script = """
from pathlib import Path
from typing import Any
from mambapool.pool import cuda_states
from mambapool.pool.handover import receive_shard
from mambapool.pool.runtime_dir import RuntimeDir
if sys.argv[2] == "by handle":
    of_uuid, memories = cuda_states.open_shard, {}
    def open_shard(descriptor):
        handle = descriptor.cuda.handle
        if handle not in memories:
            memories[handle] = of_uuid(descriptor)
        return memories[handle]
    cuda_states.open_shard = open_shard
def attach():
    descriptor, _ = receive_shard(RuntimeDir(Path(directory)).keeper_socket("default", 0), 5.0)
    return cuda_states.CudaStatePool.open(descriptor).states["temporal"]
kept = attach()
kept[:] = 7.0
say("mapped")
hear()
say(float(attach().max()))
"""
    settings = {"SIM_CUDA_HANDLES": "repeat"}

    def start_keeper() -> Child:
        options = ("--slots", "8", "--device", "cuda", *(f"--state={state}" for state in SMALL_STATE))
        keeper = machine.command("keeper", "--dir", runtime_dir, *options, **settings)
        assert keeper.hear().startswith("mambapool ready")
        return keeper

    keeper = start_keeper()
    workers = {
        how: machine.start(PRELUDE + script, runtime_dir, how, **settings) for how in ("by uuid", "by handle")
    }
    assert [worker.hear() for worker in workers.values()] == ["mapped", "mapped"]
    keeper.close()
    start_keeper()
    for worker in workers.values():
        worker.say("again")
    assert {how: worker.hear() for how, worker in workers.items()} == {"by uuid": "0.0", "by handle": "7.0"}


@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=pytest.mark.heavy)])
def test_importers_that_come_go_and_die_cost_the_device_nothing(
    gpu_pools: GpuPools, machine: SimulatedMachine, rounds: int
) -> None:
    """And the keeper ends at once, whoever has asked it and never opened anything (``cases.md`` 51, 52)."""
    gpu_pool = gpu_pools.start(options=("--quarantine", "50ms"))
    orderly = """
with connect(directory, device="cpu") as worker:
    worker.states["conv"][:, worker.allocator.alloc(4)] = 1
    say(lib.simAllocated(0))
    if sys.argv[2] == "die":
        os.kill(os.getpid(), 9)
"""
    descriptor_only = """
from mambapool.pool.handover import receive_shard
from mambapool.pool.runtime_dir import RuntimeDir
from pathlib import Path
from typing import Any
cuda.visible_devices()
for _ in range(50):
    receive_shard(RuntimeDir(Path(directory)).keeper_socket("default", 0), 5.0)
say(lib.simAllocated(0))
"""
    seen = {gpu_pool.run(orderly, "leave")[0] for _ in range(rounds)} | set(gpu_pool.run(descriptor_only))
    for _ in range(min(rounds, 20)):
        child = gpu_pool.start(orderly, "die")
        seen.add(child.hear())
        assert child.wait() == -9
        wait_until(lambda: gpu_pool.daemon.pool()["free"] == 8, "what it held is free again")
    assert len(seen) == 1
    assert gpu_pool.daemon.stop(timeout=5.0) == 0
    assert machine.run(
        "import ctypes\nfrom mambapool.pool import cuda\ncuda.initialize()\n"
        "print(ctypes.CDLL('libcuda.so.1').simAllocated(0))"
    ) == ["0"]


def test_whole_states_are_cleared_and_copied(gpu_pool: GpuPool) -> None:
    script = """
with connect(directory, device="cuda") as worker:
    state = worker.states["temporal"]
    state[:] = torch.arange(9.0).view(1, 9, 1, 1, 1)
    worker.pool.clear([1, 2, 2])
    worker.pool.copy(torch.tensor([3, 4]), [4, 3])
    on_device = worker.allocator.alloc(2)
    worker.pool.copy([5, 6], on_device)
    say(state[1, :, 0, 0, 0].tolist())
    for call, *arguments in (worker.pool.clear, [0]), (worker.pool.copy, [1, 2], [3, 3]), (worker.pool.copy, [1], []):
        try:
            call(*arguments)
        except ValueError as error:
            say(type(error).__name__)
"""
    assert gpu_pool.run(script) == [
        "[0.0, 5.0, 6.0, 4.0, 3.0, 5.0, 6.0, 7.0, 8.0]",
        "ReservedSlot",
        "DuplicateSlot",
        "ValueError",
    ]


def test_a_forked_child_is_told_to_attach_again(gpu_pool: GpuPool) -> None:
    script = """
worker = connect(directory, device="cuda")
pid = os.fork()
if pid == 0:
    try:
        worker.states
    except errors.ForkedClient:
        say("forked")
    try:
        connect(directory, device="cuda")
    except errors.MambaPoolError as error:
        say("spawn" in str(error))
    os._exit(0)
os.waitpid(pid, 0)
say(bytes_of(worker.states["conv"]))
worker.close()
"""
    assert gpu_pool.run(script) == ["forked", "True", "{0}"]


def test_a_guaranteed_session_names_slots_where_clones_stand_for_them(gpu_pool: GpuPool) -> None:
    script = """
worker = connect(directory, device="cuda", guarantee=2)
slots = worker.allocator.alloc(2)
worker.allocator.free(device_ids(*slots.tolist()))
until(lambda: worker.allocator._ids.unknown == 0)
say(worker.allocator.held())
again = worker.allocator.alloc(2)
say(worker.allocator.held() == sorted(again.tolist()) == sorted(slots.tolist()))
worker.close()
"""
    assert gpu_pool.run(script) == ["[]", "True"]


def test_tags_of_what_a_gpu_session_allocates_are_shown(gpu_pool: GpuPool) -> None:
    script = """
worker = connect(directory, device="cuda")
worker.allocator.alloc(2, tag="prefill")
worker.allocator.alloc_group_begin(2, tag="step 7")
say("has them")
hear()
worker.close()
"""
    holder = gpu_pool.start(script)
    assert holder.hear() == "has them"
    found = AuditedPool(ask_audit(gpu_pool.daemon.directory, 5.0, "default"))
    assert sorted((held.kind, held.tag) for held in found.holdings()) == [
        *[("held", "prefill")] * 2,
        *[("window", "step 7")] * 2,
    ]
    holder.say("end")
    assert holder.wait() == 0
