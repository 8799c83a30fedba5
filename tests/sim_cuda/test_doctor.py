"""``mambapool doctor``, with simulated GPUs and without any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from daemons import mambapool
from simulated_gpu import SimulatedMachine

Findings = dict[str, dict[str, str]]


def _doctor(directory: Path, *arguments: str) -> tuple[int, Findings]:
    """On this machine, with its GPUs hidden."""
    ended = mambapool("doctor", "--dir", str(directory), "--json", *arguments, CUDA_VISIBLE_DEVICES="-1")
    assert not ended.stderr, ended.stderr
    return ended.returncode, _findings(ended.stdout)


def _doctor_on(machine: SimulatedMachine, directory: Path, **settings: str) -> tuple[int, Findings]:
    doctor = machine.command("doctor", "--dir", directory, "--json", "--device", "cuda", **settings)
    found = _findings(doctor.hear())
    status = doctor.wait()
    assert not doctor.stderr, doctor.stderr
    return status, found


def _findings(text: str) -> Findings:
    found = json.loads(text)
    assert all(finding["means"] and (finding["todo"] or finding["state"] == "good") for finding in found)
    return {finding["what"]: finding for finding in found}


def test_a_machine_with_gpus_shares_their_memory(machine: SimulatedMachine, runtime_dir: Path) -> None:
    status, found = _doctor_on(machine, runtime_dir, SIM_CUDA_VERSION="13010")
    assert status == 0
    assert {what: finding["state"] for what, finding in found.items() if finding["state"] == "bad"} == {}
    assert found["driver"]["found"] == "CUDA 13.1"
    assert found["GPU 1"]["found"].startswith("GPU-22232425")
    assert found["sharing GPU 0"]["state"] == found["sharing GPU 1"]["state"] == "good"


@pytest.mark.parametrize(
    ("settings", "what", "words"),
    [
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "GPU", "CUDA_VISIBLE_DEVICES=-1"),
        ({"SIM_CUDA_IPC": "0"}, "sharing GPU 0", "cannot export memory"),
        ({"SIM_CUDA_FAULTS": "cuIpcOpenMemHandle:201"}, "sharing GPU 0", "cannot be mapped"),
        ({"SIM_CUDA_FAULTS": "cuMemAlloc:2"}, "sharing GPU 0", "the probe needs"),
    ],
    ids=["hidden", "no IPC", "import", "memory"],
)
def test_what_will_not_work_is_status_1(
    machine: SimulatedMachine, runtime_dir: Path, settings: dict[str, str], what: str, words: str
) -> None:
    status, found = _doctor_on(machine, runtime_dir, SIM_CUDA_DEVICES="1", **settings)
    assert (status, found[what]["state"]) == (1, "bad")
    assert words in found[what]["found"]


def test_a_driver_that_does_not_answer_is_given_up_on(machine: SimulatedMachine) -> None:
    script = """
from mambapool.service import doctor_gpu
doctor_gpu.TIMEOUT_S = 4.0
started = time.monotonic()
for finding in doctor_gpu.look_at_gpus(wanted=True):
    if finding.what == "sharing GPU 0":
        print(finding.state, finding.found)
print(time.monotonic() - started < 20)
"""
    said = machine.run("import time" + script, SIM_CUDA_DEVICES="1", SIM_CUDA_LATENCY_US="60000000")
    assert said == ["bad the exporter did not answer within 4 s", "True"]


def test_without_a_gpu_the_host_is_looked_at_all_the_same(runtime_dir: Path) -> None:
    status, found = _doctor(runtime_dir)
    assert (status, found["GPU"]["state"]) == (0, "note")
    host = ("versions", "runtime directory", "record locks", "SO_PEERPIDFD", "file descriptors", "host memory")
    assert all(what in found for what in host)
    assert found["record locks"]["state"] == "good"
    assert _doctor(runtime_dir, "--device", "cuda")[0] == 1


def test_a_directory_that_cannot_be_used_is_status_1(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, found = _doctor(tmp_path / "file")
    assert (status, found["runtime directory"]["state"]) == (1, "bad")
