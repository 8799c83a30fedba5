"""`docker compose up` alone: a replay through four workers in four containers, to its summary; and how they run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compose_project import UP, NewProject, Project, docker, inspect
from daemons import Daemon, mambapool

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

REQUESTS = 1000
SERVICES = ("keeper", "allocator", "worker-0", "worker-1", "worker-2", "worker-3", "replay")
STATES = ("conv=bfloat16:4x96x3", "temporal=float32:4x2x16x8")
TRACE = Path(__file__).parents[2] / "bench/traces/mooncake_conversation_trace.jsonl.gz"

DaemonFactory = Callable[..., Daemon]


@pytest.fixture(scope="module")
def ended(new_project: NewProject) -> tuple[Project, subprocess.CompletedProcess[str]]:
    """The project after `up`, without a flag."""
    project = new_project(**UP, MAMBAPOOL_SLOTS="512", MAMBAPOOL_REQUESTS=str(REQUESTS))
    return project, project.compose("up", check=False)


def summary(project: Project) -> dict[str, Any]:
    """The last one: the containers' logs are kept from start to start."""
    found: dict[str, Any] = json.loads(docker("logs", project.container("replay")).stdout.splitlines()[-1])
    return found


def test_up_ends_with_every_state_right_and_messages_as_on_the_host(
    ended: tuple[Project, subprocess.CompletedProcess[str]], daemon_factory: DaemonFactory
) -> None:
    project, up = ended
    assert up.returncode == 0, up.stdout + up.stderr
    found = summary(project)
    assert (found["requests"], found["finished"], found["mismatches"]) == (REQUESTS, REQUESTS, 0)
    assert (found["schedulers"], found["slots"]) == (4, 512)
    for service in SERVICES:
        state = project.inspect(service)["State"]
        assert (state["Status"], state["ExitCode"], state["OOMKilled"]) == ("exited", 0, False), service
    daemon = daemon_factory(slots=512, states=STATES)
    options = ("--dir", str(daemon.dir), "--limit", str(REQUESTS), "--schedulers", "4", "--json")
    on_host = json.loads(mambapool("replay", str(TRACE), *options, timeout=100.0).stdout)
    same = ("steps", "finished", "waits", "peak_held")
    assert {key: found[key] for key in same} == {key: on_host[key] for key in same}
    assert found["messages"] == pytest.approx(on_host["messages"], rel=0.05)


def test_no_container_shares_a_namespace_or_has_a_privilege(
    ended: tuple[Project, subprocess.CompletedProcess[str]],
) -> None:
    project, _ = ended
    for service in SERVICES:
        found = project.inspect(service)
        host = found["HostConfig"]
        assert host["NetworkMode"] == "none", service
        assert host["IpcMode"] in ("private", "none"), service
        assert host["PidMode"] == host["UTSMode"] == host["UsernsMode"] == "", service
        assert host["Privileged"] is False, service
        assert host["ReadonlyRootfs"] is True, service
        assert host["CapDrop"] == ["ALL"], service
        assert not host["CapAdd"], service
        assert not host["Devices"], service
        assert "no-new-privileges:true" in host["SecurityOpt"], service
        assert not [option for option in host["SecurityOpt"] if "unconfined" in option], service
        assert host["Memory"] > 0, service
        assert host["PidsLimit"] > 0, service
        assert found["Config"]["User"] == "10001:10001", service
        assert not host["PortBindings"], service
        writable = {mount["Destination"] for mount in found["Mounts"] if mount["RW"]}
        assert writable == {"/run/mambapool"}, service


def test_the_images_have_no_compiler_no_pip_and_torch_only_where_it_is_used() -> None:
    sizes = {}
    for target in ("keeper", "allocator", "worker"):
        image = f"mambapool/{target}"
        sizes[target] = inspect(image)["Size"]
        script = "command -v cc gcc clang pip make protoc; python3 -c 'import torch' 2>&1 | tail -1"
        said = docker("run", "--rm", "--network", "none", "--entrypoint", "sh", image, "-c", script).stdout
        assert said == ("" if target == "worker" else "ModuleNotFoundError: No module named 'torch'\n"), target
    assert sizes["keeper"] == sizes["allocator"] < sizes["worker"] / 3


def test_up_again_replays_again_and_down_leaves_nothing(
    ended: tuple[Project, subprocess.CompletedProcess[str]],
) -> None:
    project, _ = ended
    before = project.container("replay")
    again = project.compose("up", check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert project.container("replay") == before, "the same containers, started a second time"
    assert len(project.logs("replay").splitlines()) == 2
    assert summary(project)["mismatches"] == 0
    assert project.left()
    project.down()
    assert project.left() == []
