"""The allocator and the keeper in their containers: killed, paused, and what lies in the volume taken away."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from compose_project import EngineError, NewProject, Project, Run, docker
from daemons import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

Ask = Callable[..., list[Run]]


def crash(project: Project, service: str) -> None:
    """SIGKILL from outside, as the OOM killer's: the engine was not asked, so that its restart policy holds."""
    os.kill(project.inspect(service)["State"]["Pid"], signal.SIGKILL)


def epoch(project: Project) -> int | None:
    """The allocator's; None while none answers."""
    with contextlib.suppress(EngineError):
        found: int = project.mambapool("status")["epoch"]
        return found
    return None


def test_a_crashed_allocator_is_brought_back_by_its_policy_and_nothing_is_lost(project: Project, ask: Ask) -> None:
    idle, busy = ask("idle", "busy")
    mine = json.loads(idle.ask("alloc 6"))
    idle.ask("write 9")
    before = project.mambapool("status")
    busy.say("work 8")
    for crashes in (1, 2):
        crash(project, "allocator")
        wait_until(lambda n=crashes: epoch(project) == before["epoch"] + n, "the next one answers", timeout=30.0)  # type: ignore[misc]
    assert project.inspect("allocator")["RestartCount"] == 2
    worked = json.loads(busy.hear())
    assert worked["steps"] > 100, "calls waited, and went on"
    assert worked["slowest_s"] > 0.1, "it was away"
    assert idle.ask("read " + " ".join(map(str, mine))) == "[9.0]"
    assert {held["name"]: held["held"] for held in project.pool()["holders"]} == {"idle": 6, "busy": 0}
    assert idle.ask("free") == "64"
    assert project.inspect("keeper")["RestartCount"] == 0


def test_a_killed_and_started_allocator_takes_over(project: Project, ask: Ask) -> None:
    """`docker kill` counts as an operator's wish: the policy does not hold, `start` does."""
    (run,) = ask("holder")
    run.ask("alloc 2")
    docker("kill", "-s", "KILL", project.container("allocator"))
    run.say("alloc 3")
    assert not run.said_something(1.0), "the call waits"
    docker("start", project.container("allocator"))
    assert run.hear() == "[3, 4, 5]"
    assert project.pool()["held"] == 5


def test_while_the_allocator_is_paused_calls_wait_and_then_go_on(project: Project, ask: Ask) -> None:
    (run,) = ask("waiting")
    allocator = project.container("allocator")
    docker("pause", allocator)
    try:
        run.say("alloc 2")
        assert not run.said_something(1.5)
    finally:
        docker("unpause", allocator)
    assert run.hear() == "[1, 2]"
    assert project.pool()["held"] == 2


@pytest.fixture
def own(new_project: NewProject) -> Iterator[Project]:
    """A project that does not survive its test."""
    project = new_project()
    project.start()
    yield project
    project.down()


def test_files_that_are_removed_stop_newcomers_by_name_and_nobody_else(own: Project) -> None:
    """Case 59: who is attached goes on, by its descriptors; who comes is told what is missing."""
    one, two = own.ask("one", "two")
    (slot,) = json.loads(one.ask("alloc 1"))
    one.ask("write 4")
    remove(own, "keeper-default-0.sock")
    assert two.ask(f"read {slot}") == "[4.0]"
    two.ask(f"write 8 {slot}")
    assert one.ask(f"read {slot}") == "[8.0]"
    (refused,) = own.ask("newcomer", timeout=2.0)
    assert "PoolLost" in refused.attached
    assert "keeper-default-0.sock" in refused.attached
    remove(own, "*.table", "*.sock")
    assert json.loads(two.ask("work 1"))["steps"] > 0
    assert len(json.loads(one.ask("alloc 2"))) == 2
    began = time.monotonic()
    own.compose("stop", "-t", "20", "allocator", "keeper")
    assert time.monotonic() - began < 10.0
    assert [own.inspect(service)["State"]["ExitCode"] for service in ("allocator", "keeper")] == [0, 0]


def remove(project: Project, *names: str) -> None:
    files = " ".join(f"/run/mambapool/{name}" for name in names)
    docker("exec", project.container("allocator"), "sh", "-c", f"rm {files}")


def test_a_killed_keeper_is_pool_lost_for_all_and_all_end_cleanly(own: Project) -> None:
    runs = own.ask("one", "two")
    for run in runs:
        assert run.ask("alloc 2") != "null"
    docker("kill", "-s", "KILL", own.container("keeper"))
    for run in runs:
        wait_until(lambda r=run: "PoolLost" in r.ask("free"), "it is told", timeout=10.0)  # type: ignore[misc]
        assert "its keeper died" in run.ask("alloc 1")
        run.say("leave")
        assert run.wait() == 0
    (late,) = own.ask("late", timeout=2.0)
    assert "PoolLost" in late.attached
    assert "rank 0 died" in own.pool()["lost"]
    own.compose("stop")
    assert own.inspect("allocator")["State"]["ExitCode"] == 0
    # The whole project again: another memory, nothing of the old one in the way.
    own.start()
    (again,) = own.ask("again")
    assert again.ask("alloc 1") == "[1]"
