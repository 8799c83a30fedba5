"""What a container limits: memory, which is looked at before it is taken, and /dev/shm, which does not matter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from compose_project import NewProject, docker

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

#: 1 MiB of a state per slot, in float32.
MIB_STATE = "temporal=float32:1x262144"


@pytest.mark.parametrize("slots", [200, 100_000])
def test_a_limit_too_small_for_the_pool_is_a_message_and_no_kill(new_project: NewProject, slots: int) -> None:
    project = new_project(MAMBAPOOL_STATE=MIB_STATE, MAMBAPOOL_SLOTS=str(slots), MAMBAPOOL_KEEPER_MEMORY="128m")
    project.compose("up", "--no-deps", "keeper", check=False)
    state = project.inspect("keeper")["State"]
    assert (state["Status"], state["ExitCode"], state["OOMKilled"]) == ("exited", 1, False)
    log = project.logs("keeper")
    assert f"needs {(slots + 1) << 20} bytes" in log
    assert "are available by memory." in log, "the cgroup's limit, by its name"
    assert "ask for fewer slots, free memory, or raise that limit" in log
    project.down()
    assert project.left() == []


def test_a_pool_larger_than_dev_shm_is_whole_and_is_charged_to_the_keeper(new_project: NewProject) -> None:
    """Case 56: 64 MiB of /dev/shm, the engine's default, and a pool of 400 in workers that may have no such thing."""
    slots = 400
    project = new_project(MAMBAPOOL_STATE=MIB_STATE, MAMBAPOOL_SLOTS=str(slots), MAMBAPOOL_KEEPER_MEMORY="512m")
    project.start()
    (worker,) = project.ask("engine")
    before = charged(worker.name)
    assert len(json.loads(worker.ask(f"alloc {slots}"))) == slots
    worker.ask("write 3")
    assert worker.ask(f"read 1 {slots // 2} {slots}") == "[3.0]", "every row can be written"
    assert charged(worker.name) - before < 64 << 20
    assert charged(project.container("keeper")) > slots << 20
    for container in (worker.name, project.container("keeper")):
        shm = (
            docker("exec", container, "df", "--output=size,used", "-k", "/dev/shm").stdout.splitlines()[1].split()
        )
        assert [int(kib) for kib in shm] == [64 << 10, 0]
    project.down()


def charged(container: str) -> int:
    """The bytes that the container's memory cgroup has to answer for, of either version."""
    pid = json.loads(docker("inspect", container).stdout)[0]["State"]["Pid"]
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return int(Path(f"/sys/fs/cgroup/memory{path}/memory.usage_in_bytes").read_text())
        if not controllers:
            unified = Path(f"/sys/fs/cgroup{path}/memory.current")
            if unified.exists():
                return int(unified.read_text())
    raise AssertionError(f"no memory cgroup of {container}")
