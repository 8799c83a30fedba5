"""Keepers whose memory is a GPU's, on the simulated driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from daemons import SMALL_STATE
from processes import Child
from simulated_gpu import SimulatedMachine

from mambapool.client.operators import ask_status
from mambapool.pool.descriptor import CUDA_IPC, ShardDescriptor
from mambapool.pool.handover import receive_shard
from mambapool.pool.runtime_dir import RuntimeDir

STATE = tuple(part for state in SMALL_STATE for part in ("--state", state))
FIRST, SECOND = "GPU-11121314-1516-1718-191a-1b1c1d1e1f20", "GPU-22232425-2627-2829-2a2b-2c2d2e2f3031"


def _keeper(directory: Path, *more: str) -> tuple[str, ...]:
    return ("keeper", "--dir", str(directory), "--slots", "8", "--device", "cuda", *STATE, *more)


def _kept(directory: Path, rank: int = 0) -> ShardDescriptor:
    descriptor, fd = receive_shard(RuntimeDir(directory).keeper_socket("default", rank), 5.0)
    assert fd is None
    return descriptor


def _ready(command: Child) -> Child:
    line = command.hear()
    assert line.startswith("mambapool ready"), line
    return command


def _end(command: Child) -> int:
    os.kill(command.pid, signal.SIGTERM)
    return command.wait()


def _refused(command: Child) -> str:
    """The one line with which a command ends at once, with status 1."""
    assert command.wait() == 1, command.stderr
    return _last_line(command.stderr)


def _refused_from_nothing(*arguments: str, **environment: str) -> str:
    """The same of a process that is started as a shell starts it, and finds nothing loaded."""
    command = [sys.executable, "-m", "mambapool.service", *arguments]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}, check=False
    )
    assert ended.returncode == 1, ended
    return _last_line(ended.stderr)


def _last_line(stderr: str) -> str:
    line = stderr.strip().splitlines()[-1]
    assert line.startswith("mambapool: "), stderr
    return line


def test_a_keeper_describes_zeroed_memory_of_its_device_and_frees_it_at_the_end(
    machine: SimulatedMachine, runtime_dir: Path
) -> None:
    script = """
import ctypes, sys
from mambapool.pool import cuda
from cuda.bindings import driver
context = cuda.primary_context(cuda.visible_devices()[0])
handle = driver.CUipcMemHandle()
ctypes.memmove(handle.getPtr(), bytes.fromhex(sys.argv[1]), 64)
size = int(sys.argv[2])
with context.current():
    block = cuda.call("cuIpcOpenMemHandle", handle, 1)
    data = bytearray(size)
    cuda.call("cuMemcpyDtoH", data, block, size)
    print(data == bytes(size), ctypes.CDLL("libcuda.so.1").simAllocated(0))
"""
    allocated = "import ctypes; from mambapool.pool import cuda; cuda.initialize(); "
    allocated += "print(ctypes.CDLL('libcuda.so.1').simAllocated(0))"
    keeper = _ready(machine.command(*_keeper(runtime_dir), SIM_CUDA_LATENCY_US="200000"))
    shard = _kept(runtime_dir)
    assert shard.cuda is not None
    assert (shard.backend, shard.pid) == (CUDA_IPC, keeper.pid)
    assert shard.cuda.device.hex() == FIRST.removeprefix("GPU-").replace("-", "")
    assert shard.cuda.pid_namespace == os.stat("/proc/self/ns/pid").st_ino
    assert machine.run(script, shard.cuda.handle.hex(), shard.size_bytes) == [f"True {shard.size_bytes}"]
    assert _end(keeper) == 0
    assert machine.run(allocated) == ["0"]


def test_each_rank_has_the_device_that_it_sees_at_its_place(machine: SimulatedMachine, runtime_dir: Path) -> None:
    options = ("--slots", "4", "--device", "cuda", "--tp-size", "2", *STATE)
    serve = _ready(machine.command("serve", "--dir", runtime_dir, *options, CUDA_VISIBLE_DEVICES="1,0"))
    first, second = (_kept(runtime_dir, rank).cuda for rank in (0, 1))
    (pool,) = ask_status(RuntimeDir(runtime_dir), 5.0)["pools"]
    assert (pool["backend"], pool["shards"]) == ("cuda-ipc", 2)
    assert first is not None
    assert second is not None
    assert (first.device[0], second.device[0]) == (0x22, 0x11)
    assert _end(serve) == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"SIM_CUDA_MEMORY_MIB": "0"},
            ["needs", f"on {FIRST}", "has 0 of 0 free", SECOND, "CUDA_VISIBLE_DEVICES"],
        ),
        (
            {"CUDA_VISIBLE_DEVICES": "7"},
            ["no GPU can be used", "no CUDA-capable device", "CUDA_VISIBLE_DEVICES=7"],
        ),
        ({"SIM_CUDA_IPC": "0"}, [FIRST, "cannot export", "801", "Tegra"]),
        ({"SIM_CUDA_IPC": "0", "SIM_CUDA_MIG": "1"}, ["MIG-ee121314", "is a MIG instance"]),
        ({"SIM_CUDA_FAULTS": "cuMemsetD8:700"}, ["cuMemsetD8 failed", "illegal memory access", "700"]),
    ],
    ids=["memory", "device", "export", "mig", "call"],
)
def test_what_is_in_a_keepers_way_is_said_with_what_is_visible(
    machine: SimulatedMachine, runtime_dir: Path, settings: dict[str, str], said: list[str]
) -> None:
    line = _refused(machine.command(*_keeper(runtime_dir), **settings))
    assert [words for words in said if words not in line] == [], line
    assert not RuntimeDir(runtime_dir).keeper_socket("default", 0).exists()


def test_a_keeper_without_a_driver_says_so(machine: SimulatedMachine, runtime_dir: Path) -> None:
    environment = {**machine.environment(), "LD_LIBRARY_PATH": "/nowhere"}
    line = _refused_from_nothing(*_keeper(runtime_dir), **environment)
    assert "no GPU can be used" in line
    assert "CUDA_VISIBLE_DEVICES is not set" in line


def test_a_keeper_without_cuda_bindings_says_what_to_install(machine: SimulatedMachine, runtime_dir: Path) -> None:
    hidden = runtime_dir.parent / "hidden" / "cuda"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").touch()
    environment = machine.environment()
    environment["PYTHONPATH"] = f"{hidden.parent}{os.pathsep}{environment['PYTHONPATH']}"
    assert "pip install 'mambapool[cuda]'" in _refused_from_nothing(*_keeper(runtime_dir), **environment)
