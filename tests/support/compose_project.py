"""Compose projects for tests: started as a user starts them, looked at through the engine, taken down whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from daemons import wait_until
from processes import Lines

from mambapool.pool.polling import readable

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "docker/compose.yaml"

ASKED_WORKER = (ROOT / "tests/docker/asked_worker.py").read_text()

#: Bounds every command of the engine, and every wait for a container to say something.
ENGINE_S = 100.0

#: As in docker/compose.yaml, but that they stay until they are told to end, and are hardly looked at: each look of the
#: engine's at a container's health starts a Python, and a few containers' would take a core.
STAYING = {"MAMBAPOOL_EXIT_IDLE": "", "MAMBAPOOL_HEALTH_INTERVAL": "30s", "MAMBAPOOL_SLOTS": "64"}

#: As it is for a user, who starts one by the other's health.
UP = {"MAMBAPOOL_EXIT_IDLE": "1s", "MAMBAPOOL_HEALTH_INTERVAL": "1s", "MAMBAPOOL_JSON": "1"}


class EngineError(AssertionError):
    """A command of the engine failed; says which, and what it said."""


def docker(*arguments: str, check: bool = True, timeout: float = ENGINE_S) -> subprocess.CompletedProcess[str]:
    return _run(["docker", *arguments], dict(os.environ), check=check, timeout=timeout)


def compose_command() -> list[str]:
    """``docker compose`` where the engine's client has it, else ``docker-compose``."""
    if shutil.which("docker") and docker("compose", "version", check=False).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"]


def why_no_engine() -> str | None:
    """What is missing for these tests, or None."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    command = compose_command()
    if shutil.which(command[0]) is None:
        return "there is neither docker compose nor docker-compose"
    found = docker("version", "--format", "{{.Server.Version}}", check=False)
    if found.returncode:
        return f"no engine answers: {found.stderr.strip()}"
    for target in ("keeper", "allocator", "worker"):
        if docker("image", "inspect", f"mambapool/{target}", check=False).returncode:
            return f"there is no image mambapool/{target}"
    return None


class Project:
    """One compose project, in a name of its own; nothing of it is left afterwards."""

    def __init__(self, name: str, *files: Path, **environment: str) -> None:
        self.name = name
        files = (COMPOSE_FILE, *files)
        self._command = [*compose_command(), "-p", name, *(word for file in files for word in ("-f", str(file)))]
        self._environment = {**os.environ, **STAYING, **environment}
        self._runs: list[Run] = []
        self._started = 0

    def compose(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return _run([*self._command, *arguments], self._environment, check=check, timeout=ENGINE_S)

    def start(self, *keepers: str) -> None:
        """Keepers and allocator, until the allocator answers."""
        # One command for both would wait for the keepers' health, which is looked at too rarely.
        self.compose("up", "-d", "--no-deps", *(keepers or ("keeper",)))
        self.compose("up", "-d", "--no-deps", "allocator")
        wait_until(self.answers, "the allocator answers", timeout=30.0)

    def run(
        self,
        script: str,
        *options: str,
        service: str = "worker-0",
        arguments: tuple[str, ...] = (),
        tag: str = "latest",
    ) -> Run:
        """``script`` as a worker, isolated as the compose file says; it is told and heard line by line."""
        self._started += 1
        name = f"{self.name}-run-{self._started}"
        command = ["run", "--no-deps", "-T", "--name", name, *options, "--entrypoint", "python3"]
        run = Run(
            name,
            [*self._command, *command, service, "-c", textwrap.dedent(script), *arguments],
            {**self._environment, "MAMBAPOOL_TAG": tag},
        )
        self._runs.append(run)
        return run

    def ask(
        self,
        *names: str,
        options: tuple[str, ...] = (),
        timeout: float = 20.0,
        tag: str = "latest",
        world_size: int = 1,
    ) -> list[Run]:
        """A worker of each name, which does what it is told, once all have said that they are there.

        With a ``world_size`` a name is a group's, and each rank of it a worker: its ranks one after the other.
        """
        runs = [
            self.run(ASKED_WORKER, *options, arguments=(name, str(timeout), str(rank), str(world_size)), tag=tag)
            for name in names
            for rank in range(world_size)
        ]
        for run in runs:
            run.attached = run.hear()
        return runs

    def container(self, service: str) -> str:
        """The id of a service's container."""
        labels = (f"com.docker.compose.project={self.name}", f"com.docker.compose.service={service}")
        options = [word for label in labels for word in ("--filter", f"label={label}")]
        # Not those of `run`, and by the engine's client: compose takes a second for it.
        found = docker("ps", "-aq", *options, "--filter", "label=com.docker.compose.oneoff=False").stdout.split()
        assert len(found) == 1, f"{service} of {self.name}: {found}"
        return found[0]

    def inspect(self, service: str) -> dict[str, Any]:
        return inspect(self.container(service))

    def answers(self) -> bool:
        status = docker("exec", self.container("allocator"), "mambapool", "status", "--json", check=False)
        return status.returncode == 0

    def mambapool(self, *arguments: str, service: str = "allocator") -> Any:
        """The JSON that a command prints inside a container."""
        return json.loads(docker("exec", self.container(service), "mambapool", *arguments, "--json").stdout)

    def pool(self) -> dict[str, Any]:
        (pool,) = self.mambapool("status")["pools"]
        found: dict[str, Any] = pool
        return found

    def check(self) -> None:
        """Every slot is in exactly one state."""
        audit = docker("exec", self.container("allocator"), "mambapool", "audit")
        assert audit.returncode == 0

    def wait_until_free(self) -> None:
        def is_free() -> bool:
            pool = self.pool()
            return bool(pool["free"] == pool["slots"] and not pool["holders"])

        wait_until(is_free, "every slot is free and nobody attached", timeout=20.0)

    def logs(self, service: str) -> str:
        done = docker("logs", self.container(service))
        return done.stdout + done.stderr

    def left(self) -> list[str]:
        """What of the project the engine still has: containers, volumes, networks."""
        label = f"label=com.docker.compose.project={self.name}"
        kinds = (("ps", "-aq"), ("volume", "ls", "-q"), ("network", "ls", "-q"))
        return [left for kind in kinds for left in docker(*kind, "--filter", label).stdout.split()]

    def close_runs(self) -> None:
        if self._runs:
            docker("rm", "-f", *(run.name for run in self._runs), check=False)
        for run in self._runs:
            run.close()
        self._runs.clear()

    def down(self) -> None:
        """End all of it, and remove its volume."""
        self.close_runs()
        self.compose("down", "-v", "--remove-orphans", "-t", "1")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.compose("logs", "--tail", "40", check=False).stdout)
        if self.left():
            self.down()


class Run:
    """A container that runs a script; its name is the container's."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        self._lines = Lines(self._process.stdout.fileno())
        #: What it said first.
        self.attached = ""

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, timeout: float = ENGINE_S) -> str:
        """The next line of its stdout, without the line's end."""
        line = self._lines.next(timeout)
        assert line, f"{self.name} said nothing: {self.log}"
        return line.rstrip("\r\n")

    def said_something(self, within_s: float) -> bool:
        """Whether something comes within so many seconds; what does is still to be heard."""
        assert self._process.stdout is not None
        return bool(readable(self._process.stdout.fileno(), timeout=within_s))

    def ask(self, line: str) -> str:
        self.say(line)
        return self.hear()

    @property
    def log(self) -> str:
        done = docker("logs", self.name, check=False)
        return done.stdout + done.stderr

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = inspect(self.name)["State"]
        return found

    def wait(self) -> int:
        """The container's exit status."""
        self._process.wait(ENGINE_S)
        status: int = self.state["ExitCode"]
        return status

    def close(self) -> None:
        """After the container's end."""
        self._process.wait(ENGINE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


#: The fixture ``new_project``.
NewProject = Callable[..., Project]


def inspect(container: str) -> dict[str, Any]:
    (found,) = json.loads(docker("inspect", container).stdout)
    return dict(found)


def _run(
    command: list[str], environment: dict[str, str], *, check: bool, timeout: float
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if check and done.returncode:
        raise EngineError(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done
