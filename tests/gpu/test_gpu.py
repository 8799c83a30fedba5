"""On one real GPU: what the simulated driver cannot show. ``run.sh`` runs all of it in a few minutes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemons import mambapool, wait_until
from gpu_daemons import GpuDaemons
from processes import Children

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

TRACE = Path(__file__).parents[2] / "bench/traces/mooncake_conversation_trace.jsonl.gz"

#: argv[1] is the daemon's directory.
PRELUDE = """
import os, sys, time, torch
from mambapool.client import connect, errors
directory = sys.argv[1]
def say(*what):
    print(*what, flush=True)
def hear():
    return sys.stdin.readline().strip()
def until(condition, timeout=20.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.002)
def cycles(seconds):
    return int(seconds * 2e9)  # of a clock of at most 2 GHz: rather longer
"""

HOLDER = """
worker = connect(directory, device="cuda")
slots = worker.allocator.alloc(2)
worker.states["temporal"][:, slots] = 5.0
torch.cuda.synchronize()
say(*slots.tolist())
hear()
say(float(worker.states["temporal"][:, slots].min()), float(worker.states["temporal"][:, slots].max()))
hear()
"""

READER = """
slots = [int(slot) for slot in sys.argv[2:]]
with connect(directory, device="cuda") as worker:
    rows = worker.states["temporal"][:, slots]
    say(float(rows.min()), float(rows.max()))
    worker.states["temporal"][:, slots] = 6.0
    torch.cuda.synchronize()
"""


def test_what_one_process_writes_two_others_read_and_write(gpu_daemons: GpuDaemons, children: Children) -> None:
    daemon = gpu_daemons.start()
    holder = children.start(PRELUDE + HOLDER, daemon.dir)
    slots = holder.hear().split()
    assert children.run(PRELUDE + READER, daemon.dir, *slots) == ["5.0 5.0"]
    assert children.run(PRELUDE + READER, daemon.dir, *slots) == ["6.0 6.0"]
    holder.say("read")
    assert holder.hear() == "6.0 6.0"


def test_a_killed_keeper_is_pool_lost_and_a_new_one_new_memory(
    gpu_daemons: GpuDaemons, children: Children
) -> None:
    daemon = gpu_daemons.start()
    holder = children.start(
        PRELUDE
        + """
worker = connect(directory, device="cuda")
say(worker.states["conv"].device)
hear()
def lost():
    try:
        worker.allocator.alloc(1)
    except errors.PoolLost:
        return True
until(lost)
say("lost")
""",
        daemon.dir,
    )
    assert holder.hear().startswith("cuda")
    os.kill(int(daemon.directory.keeper_lock("default", 0).read_text()), signal.SIGKILL)
    holder.say("go on")
    assert holder.hear() == "lost"


def test_a_killed_importer_costs_nothing_and_its_slots_come_back(
    gpu_daemons: GpuDaemons, children: Children
) -> None:
    daemon = gpu_daemons.start()
    for _ in range(3):
        holder = children.start(PRELUDE + HOLDER, daemon.dir)
        holder.hear()
        os.kill(holder.pid, signal.SIGKILL)
        wait_until(lambda: daemon.pool()["free"] == 8, "its slots are free", 10.0)


def test_the_next_owners_bytes_survive_a_kernel_on_another_stream(
    gpu_daemons: GpuDaemons, children: Children
) -> None:
    """Two seconds of work on a second stream, and a write after them, are queued when the slot is freed.

    Every kernel has run once before: loading one may wait for what the device does (CUDA C++ Programming Guide, Lazy
    Loading). The taker is there and asks before the slot is freed, and measures from that moment on.
    """
    daemon = gpu_daemons.start(slots=1)
    giver = children.start(
        PRELUDE
        + """
worker = connect(directory, device="cuda")
forward = torch.cuda.Stream()
worker.fence_streams([torch.cuda.current_stream(), forward])
slot = worker.allocator.alloc(1)
rows = worker.states["temporal"]
def queue(seconds, value):
    with torch.cuda.stream(forward):
        torch.cuda._sleep(cycles(seconds))
        rows[:, 1] = value
def found():
    return float(rows[:, 1].min()), float(rows[:, 1].max())
queue(0.001, 6.0)
torch.cuda.synchronize()
say(*found())
hear()
queue(2.0, 7.0)
started = time.monotonic()
worker.allocator.free(slot)
took = time.monotonic() - started
say(took, forward.query())
hear()
torch.cuda.synchronize()
say(*found())
""",
        daemon.dir,
    )
    taker = children.start(
        PRELUDE
        + """
with connect(directory, device="cuda") as worker:
    worker.states["temporal"][:, 0] = 9.0
    torch.cuda.synchronize()
    say("there")
    hear()
    started = time.monotonic()
    slot = worker.allocator.alloc(1, timeout=20.0)
    waited = time.monotonic() - started
    worker.states["temporal"][:, slot] = 9.0
    torch.cuda.synchronize()
    say(waited)
    hear()
""",
        daemon.dir,
    )
    assert [giver.hear(), taker.hear()] == ["6.0 6.0", "there"]
    for child in (taker, giver):
        child.say("go on")
    took_s, was_over = giver.hear().split()
    assert (float(took_s) < 0.1, was_over) == (True, "False")
    assert float(taker.hear()) > 0.3
    giver.say("read")
    assert giver.hear() == "9.0 9.0"
    taker.say("end")


@pytest.mark.parametrize("guarantee", [0, 8], ids=["list", "guarantee"])
def test_ten_thousand_allocs_and_frees_synchronise_nothing(
    gpu_daemons: GpuDaemons, children: Children, guarantee: int
) -> None:
    """Ids of clones among them, which only the device knows."""
    script = """
with connect(directory, device="cuda", guarantee=int(sys.argv[2])) as worker:
    worker.fence_streams([torch.cuda.current_stream()])
    allocator = worker.allocator
    allocator.free(allocator.alloc(1).clone())
    allocator.free(allocator.alloc(2))
    torch.cuda.set_sync_debug_mode("error")
    started = time.monotonic()
    for number in range(10_000):
        slot = allocator.alloc(1)
        allocator.free(slot.clone() if number % 4 == 0 else slot)
    torch.cuda.set_sync_debug_mode("default")
    say(time.monotonic() - started)
    until(lambda: not allocator._ids.unknown)
    say(allocator.available_size(), sorted(allocator.alloc(8).tolist()))
"""
    daemon = gpu_daemons.start()
    seconds, rest = children.run(PRELUDE + script, daemon.dir, guarantee)
    print(f"10,000 alloc/free: {float(seconds):.3f} s")  # noqa: T201  for docs/gpu.md
    assert rest == "8 [1, 2, 3, 4, 5, 6, 7, 8]"


def test_settings_of_torchs_allocator_do_not_matter(gpu_daemons: GpuDaemons, children: Children) -> None:
    segments = "expandable_segments:True"
    daemon = gpu_daemons.start(PYTORCH_CUDA_ALLOC_CONF=segments)
    holder = children.start(PRELUDE + HOLDER, daemon.dir, PYTORCH_CUDA_ALLOC_CONF=segments)
    read = children.run(PRELUDE + READER, daemon.dir, *holder.hear().split(), PYTORCH_CUDA_ALLOC_CONF=segments)
    assert read == ["5.0 5.0"]


def test_a_device_is_found_by_its_uuid(gpu_daemons: GpuDaemons, children: Children) -> None:
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    daemon = gpu_daemons.start()
    holder = children.start(PRELUDE + HOLDER, daemon.dir, CUDA_VISIBLE_DEVICES=uuid)
    assert children.run(PRELUDE + READER, daemon.dir, *holder.hear().split()) == ["5.0 5.0"]


def test_a_replay_has_no_mismatch(gpu_daemons: GpuDaemons) -> None:
    daemon = gpu_daemons.start(slots=256)
    options = ("--device", "cuda", "--limit", "200", "--json", "--dir", str(daemon.dir))
    ended = mambapool("replay", str(TRACE), *options, timeout=110)
    assert ended.returncode == 0, ended.stderr
    assert '"mismatches": 0' in ended.stdout


def test_attach_and_copy_take_what_the_device_takes(gpu_daemons: GpuDaemons, children: Children) -> None:
    script = """
torch.zeros(1, device="cuda")
started = time.monotonic()
with connect(directory, device="cuda") as worker:
    say(f"attach {(time.monotonic() - started) * 1000:.1f} ms")
    state = worker.states["temporal"]
    like = torch.empty_like(state[:, :4])
    def timed(call):
        call()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(20):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 20
    src, dst = torch.tensor([1, 2, 3, 4], device="cuda"), torch.tensor([5, 6, 7, 8], device="cuda")
    own, plain = timed(lambda: worker.pool.copy(src, dst)), timed(lambda: like.copy_(state[:, :4]))
    cleared = timed(lambda: worker.pool.clear(dst))
    say(f"copy {own:.3f} ms, clear {cleared:.3f} ms, a device copy of the same {plain:.3f} ms")
    say(own < 10 * plain + 1.0)
"""
    *figures, is_fair = children.run(PRELUDE + script, gpu_daemons.start().dir)
    print("\n".join(figures))  # noqa: T201  for docs/gpu.md
    assert is_fair == "True"


def test_doctor_shares_memory_of_every_gpu(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mambapool.service",
        "doctor",
        "--device",
        "cuda",
        "--dir",
        str(tmp_path / "run"),
    ]
    started = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "works between two processes" in ended.stdout
    assert time.monotonic() - started < 60
