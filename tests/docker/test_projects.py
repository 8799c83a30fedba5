"""Whole projects: side by side, stopped and started, killed over and over on a volume that keeps everything."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from compose_project import NewProject, Project, docker, inspect

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

ON_DISK = Path(__file__).parent / "on_disk.yaml"
USER = 10001


@pytest.fixture
def on_disk(new_project: NewProject, tmp_path: Path) -> Iterator[tuple[Project, Path]]:
    """A project whose runtime directory is a folder of the host, and that folder."""
    directory = tmp_path / "runtime"
    directory.mkdir(mode=0o700)
    os.chown(directory, USER, USER)
    project = new_project(ON_DISK, RUNTIME_DIR=str(directory))
    yield project, directory
    project.down()


def test_kills_leave_nothing_that_is_in_the_way_and_nothing_that_grows(on_disk: tuple[Project, Path]) -> None:
    """Case 57, with what it calls segments: sockets, locks, tables, leases."""
    project, directory = on_disk
    (directory / "psm_test").write_text("somebody else's")
    found = []
    for _ in range(3):
        project.start()
        (worker,) = project.ask("doomed")
        assert worker.ask("alloc 2") == "[1, 2]", "an empty pool"
        docker("kill", "-s", "KILL", worker.name, project.container("allocator"), project.container("keeper"))
        worker.wait()
        project.close_runs()
        found.append(sorted(path.relative_to(directory).parts[0] for path in directory.rglob("*")))
    assert found[1] == found[2], "one round after the other"
    assert found[2].count("leases") == 2, "the folder, and the lease of the last one killed"
    assert {"ready", "default.table", "allocator.sock", "keeper-default-0.sock"} <= set(found[2])
    assert (directory / "psm_test").read_text() == "somebody else's"


def test_a_stopped_project_starts_again_and_down_leaves_nothing(on_disk: tuple[Project, Path]) -> None:
    project, directory = on_disk
    project.start()
    before = project.mambapool("status")["epoch"]
    project.compose("stop")
    states = [project.inspect(service)["State"] for service in ("keeper", "allocator")]
    assert [(state["Status"], state["ExitCode"]) for state in states] == [("exited", 0)] * 2
    assert not list(directory.glob("*.sock")), "who ends in order takes its socket along"
    project.start()
    assert project.pool()["free"] == 64
    assert project.mambapool("status")["epoch"] != before
    project.down()
    assert project.left() == []


def test_two_projects_side_by_side_know_nothing_of_each_other(new_project: NewProject) -> None:
    one, two = new_project(MAMBAPOOL_SLOTS="16"), new_project(MAMBAPOOL_SLOTS="32")
    for project in (one, two):
        project.start()
    workers = [*one.ask("engine"), *two.ask("engine")]
    for worker in workers:
        worker.ask("alloc 4")
    assert [worker.ask("write 1") for worker in workers] == ["null", "null"]
    workers[0].ask("write 2")
    assert workers[1].ask("read 1 2 3 4") == "[1.0]"
    assert [project.pool()["slots"] for project in (one, two)] == [16, 32]
    # Case 57 with two of them: what is killed and started again here is nobody else's there.
    docker("kill", "-s", "KILL", workers[0].name, one.container("allocator"), one.container("keeper"))
    one.start()
    assert one.pool()["free"] == 16
    assert workers[1].ask("read 1 2 3 4") == "[1.0]"
    one.down()
    assert one.left() == []
    assert json.loads(workers[1].ask("work 1"))["steps"] > 0
    assert two.pool()["held"] == 4
    assert inspect(two.container("keeper"))["State"]["Running"]
    two.down()
