"""The engine that these tests need, and projects that are taken down whatever happens."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from compose_project import NewProject, Project, Run, why_no_engine

#: Of tests/docker/run, which has made the engine and the images: there is no reason to skip then.
REQUIRED = os.environ.get("TEST_DOCKER") == "required"


@pytest.fixture(scope="session", autouse=True)
def _engine() -> None:
    missing = why_no_engine()
    if missing is not None and REQUIRED:
        pytest.fail(missing)
    if missing is not None:
        pytest.skip(f"{missing}: make test-docker")


@pytest.fixture(scope="module")
def new_project() -> Iterator[NewProject]:
    """Makes projects, each under a name of its own; they end with the module."""
    with ExitStack() as projects:

        def make(*files: Path, **environment: str) -> Project:
            return projects.enter_context(Project(f"mp{secrets.token_hex(3)}", *files, **environment))

        yield make


@pytest.fixture(scope="module")
def staying(new_project: NewProject) -> Project:
    """Keeper and allocator of 64 slots, which stay."""
    project = new_project()
    project.start()
    return project


@pytest.fixture
def project(staying: Project) -> Iterator[Project]:
    """The same, checked and left empty after every test."""
    yield staying
    staying.close_runs()
    staying.wait_until_free()
    staying.check()


@pytest.fixture
def ask(project: Project) -> Callable[..., list[Run]]:
    """Starts a worker of each name, which does what it is told, and waits until all have said that they are there."""
    return lambda *names, **options: project.ask(*names, **options)
