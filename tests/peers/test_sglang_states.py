"""SGLang's own code over the mapped states of a shared pool, with ids above what it was given (docs/sglang.md)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang_wheel
from daemons import Daemon, start_daemon, wait_until

from mambapool.client import Worker

pytestmark = pytest.mark.skipif(bool(sglang_wheel.missing()), reason=sglang_wheel.missing())

HERE = Path(__file__).parent
CHECKOUT = HERE.parent.parent

#: More than twice what bench/sglang_scheduler.py gives its engine; the first half is somebody else's.
POOL_SLOTS = 600
OTHERS = 300
STATES = ("conv=bfloat16:1x288x3", "temporal=bfloat16:1x2x16x16")


class Sglang:
    """The process that runs sglang_states.py."""

    def __init__(self, daemon: Daemon, plugins: Path) -> None:
        environment = sglang_wheel.environment(CHECKOUT / "bench", plugins)
        environment |= {"MAMBAPOOL_DIR": str(daemon.dir), "MAMBAPOOL_SGLANG": "states"}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "sglang_states.py"), str(POOL_SLOTS)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, name: str) -> list[str]:
        """Run one function there; what it printed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(name, file=self.process.stdin, flush=True)
        lines = []
        while (line := self.process.stdout.readline().strip()) != "ok":
            assert line, f"{name}: the process has ended, status {self.process.wait()}"
            assert "Traceback" not in line, line.replace(" | ", "\n")
            lines.append(line)
        return lines


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mambapool-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    daemon = start_daemon(folder / "run", slots=POOL_SLOTS, states=STATES)
    yield daemon
    daemon.close()


@pytest.fixture(scope="module")
def other(daemon: Daemon) -> Worker:
    """Another engine on the same pool, whose states nobody else may touch."""
    other = daemon.connect(name="other", guarantee=OTHERS)
    for states in other.states.values():
        states[:, 1 : OTHERS + 1] = 77
    return other


@pytest.fixture(scope="module")
def sglang(daemon: Daemon, other: Worker, folder: Path) -> Iterator[Sglang]:
    sglang = Sglang(daemon, _plugins(folder / "plugins"))
    yield sglang
    sglang.process.kill()
    sglang.process.communicate()


def _plugins(folder: Path) -> Path:
    """The entry point as an installed mambapool has it: here it may be a checkout on PYTHONPATH."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    (group,) = project["entry-points"].items()
    metadata = folder / "mambapool-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mambapool\nVersion: 0\n")
    lines = [f"[{group[0]}]", *(f"{name} = {value}" for name, value in group[1].items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "the_plugin_replaces_what_sglang_makes",
        "arrays_have_the_rows_of_the_pool_and_size_is_what_was_granted",
        "the_scheduler_runs_on_ids_above_its_size",
        "the_idle_check_finds_no_leak_and_finds_one",
        "a_layout_of_sglangs_own_inside_a_slot_is_kept",
        "what_cannot_be_mapped_is_refused",
        "an_allocator_of_another_size_is_refused",
    ],
)
def test_in_sglang(sglang: Sglang, name: str) -> None:
    sglang.run(name)


def test_sglangs_states_are_everybodys(sglang: Sglang, other: Worker) -> None:
    said = sglang.run("states_are_written_copied_cleared_and_saved")[-1]
    slot, track, value = map(int, said.split())
    assert min(slot, track) > OTHERS
    for states in other.states.values():
        assert (states[:, [slot, track]] == value).all()


def test_killed_it_leaves_its_slots_and_nobody_elses_states(daemon: Daemon, sglang: Sglang, other: Worker) -> None:
    assert daemon.pool()["free"] < POOL_SLOTS - OTHERS
    sglang.process.kill()
    wait_until(lambda: daemon.pool()["free"] == POOL_SLOTS - OTHERS, "its slots are free")
    for states in other.states.values():
        assert (states[:, 1 : OTHERS + 1] == 77).all()
    daemon.check()
