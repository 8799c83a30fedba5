"""Tensor-parallel engines whose ranks are containers: docker/compose.groups.yaml, and one rank that is killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from compose_project import COMPOSE_FILE, UP, NewProject, Project, Run, docker
from daemons import wait_until

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

GROUPS: Path = COMPOSE_FILE.with_name("compose.groups.yaml")
SERVICES = ("keeper", "keeper-1", "allocator", "worker-0", "worker-1", "worker-2", "worker-3", "replay")
REQUESTS = 300

Ask = Callable[..., list[Run]]


@pytest.fixture(scope="module")
def staying(new_project: NewProject) -> Project:
    """Two keepers and the allocator of 64 slots, which stay."""
    project = new_project(GROUPS)
    project.start("keeper", "keeper-1")
    return project


def ask_all(ranks: list[Run], line: str) -> list[Any]:
    """All are told before the first is heard, as ranks of an engine call."""
    for rank in ranks:
        rank.say(line)
    return [json.loads(rank.hear()) for rank in ranks]


def holders(project: Project) -> dict[str, tuple[str, int]]:
    """How each session is, and what it holds."""
    return {found["name"]: (found["state"], found["held"]) for found in project.pool()["holders"]}


def test_two_engines_of_two_ranks_replay_with_every_state_right(new_project: NewProject) -> None:
    project = new_project(GROUPS, **UP, MAMBAPOOL_SLOTS="256", MAMBAPOOL_REQUESTS=str(REQUESTS))
    up = project.compose("up", check=False)
    assert up.returncode == 0, up.stdout + up.stderr
    found = json.loads(docker("logs", project.container("replay")).stdout)
    assert (found["requests"], found["finished"], found["mismatches"]) == (REQUESTS, REQUESTS, 0), "on all ranks"
    assert (found["schedulers"], found["tp_size"], found["slots"]) == (2, 2, 256)
    leaders, followers = found["rank_messages"]
    assert 0 < leaders <= 0.3 * found["steps"]
    assert followers == 0, "they read rank 0's answers"
    for service in SERVICES:
        state = project.inspect(service)["State"]
        assert (state["Status"], state["ExitCode"]) == ("exited", 0), service
    joined = project.logs("allocator")
    for scheduler in (0, 1):
        assert f"(replay-{scheduler}, pid 1)" in joined
    project.down()
    assert project.left() == []


def test_a_killed_rank_breaks_its_engine_alone_and_its_slots_stay_until_all_ranks_have_ended(
    project: Project, ask: Ask
) -> None:
    ranks = ask("left", "right", world_size=2)
    left, right = ranks[:2], ranks[2:]
    assert ask_all(left, "alloc 20") == [list(range(1, 21))] * 2
    assert ask_all(right, "alloc 3") == [[21, 22, 23]] * 2
    for value, rank in enumerate(ranks, start=1):
        rank.ask(f"write {value}")
    assert [rank.ask("read 21") for rank in right] == ["[3.0]", "[4.0]"], "each in its own shard"
    for rank in right:
        rank.say("work 60 8000")
    docker("kill", "-s", "KILL", left[1].name)
    wait_until(lambda: holders(project)["left-1"][0] == "gone", "its death is known", timeout=10.0)
    (error,) = json.loads(left[0].ask("alloc 1")).items()
    assert error[0] == "GroupBroken"
    assert "group left: rank 1" in error[1]
    assert "slots are kept until all its ranks have ended" in error[1]
    assert holders(project)["left-0"] == ("live", 20)
    assert left[0].ask("read 1 20") == "[1.0]", "nobody else has them"
    left[0].say("leave")
    assert left[0].wait() == 0
    wait_until(lambda: set(holders(project)) == {"right-0", "right-1"}, "the engine has ended")
    worked = [json.loads(rank.hear()) for rank in right]
    assert [work["steps"] for work in worked] == [8000] * 2, "the other engine went on"
    wait_until(lambda: project.pool()["free"] == 64 - 3, "all but the other engine's slots are back")
    assert [rank.ask("read 22 23") for rank in right] == ["[3.0]", "[4.0]"]
