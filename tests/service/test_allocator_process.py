"""What the allocator's process costs and brings along, and how it tells its parent how it went."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from daemons import mambapool

from mambapool.service.config import AllocatorConfig, PoolConfig
from mambapool.service.priority import NICE

#: The goals.
READY_RATIO = 1.4
RSS_KIB = 35_000

RecordProperty = Callable[[str, object], None]

PAIRS = 5
LIBRARIES = "import zmq, msgpack, numpy"
NEVER_IMPORTED = {"torch", "rich", "prometheus_client", "click", "typer", "asyncio"}


@dataclass
class Started:
    """An allocator process that has told its parent something."""

    process: subprocess.Popen[str]
    told: dict[str, Any]
    seconds: float


@contextmanager
def started(config: str, *interpreter_options: str, by: tuple[str, ...] = ()) -> Iterator[Started]:
    """As ``serve`` starts it; ended, and its stderr read to the end, afterwards."""
    began = time.perf_counter()
    reading, writing = os.pipe()
    command = [*by, sys.executable, *interpreter_options, "-m", "mambapool.service.allocator_process", config]
    with subprocess.Popen(
        [*command, str(writing)], pass_fds=[writing], stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(writing)
        try:
            with os.fdopen(reading) as pipe:
                told = json.loads(pipe.readline())
            yield Started(process, told, time.perf_counter() - began)
        finally:
            process.terminate()


@pytest.fixture
def config(runtime_dir: Path) -> str:
    """An allocator-only pool of 65,536 slots."""
    return AllocatorConfig(runtime_dir, (PoolConfig("default", 65_536),), parent_pid=os.getpid()).to_json()


def test_it_imports_nothing_that_it_does_not_need_to_decide(config: str) -> None:
    with started(config, "-X", "importtime") as allocator:
        assert allocator.told["ready"] is True
        allocator.process.terminate()
        assert allocator.process.stderr is not None
        lines = allocator.process.stderr.read().splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert {"zmq", "msgpack", "numpy", "mambapool.service.server"} <= imported
    assert not {name.partition(".")[0] for name in imported} & NEVER_IMPORTED


def test_it_is_ready_little_later_than_its_libraries_are_imported(
    config: str, record_property: RecordProperty, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The libraries' bytecode came with their installation: ours is compared when it is kept too.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    with started(config):
        pass
    ratios = []
    for _ in range(PAIRS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", LIBRARIES], check=True)
        libraries_s = time.perf_counter() - began
        with started(config) as allocator:
            ratios.append(allocator.seconds / libraries_s)
    ratio = statistics.median(ratios)
    sys.stdout.write(f"\nexec to ready: {ratio:.2f} × the import of its libraries, median of {PAIRS}\n")
    record_property("ready_ratio", round(ratio, 2))
    assert ratio <= READY_RATIO, ratios


def test_it_takes_little_memory(config: str, record_property: RecordProperty) -> None:
    with started(config) as allocator:
        lines = Path(f"/proc/{allocator.process.pid}/status").read_text().splitlines()
    (rss_kib,) = [int(line.split()[1]) for line in lines if line.startswith("VmRSS:")]
    sys.stdout.write(f"\nresident: {rss_kib} kB at 65,536 slots\n")
    record_property("rss_kib", rss_kib)
    assert rss_kib <= RSS_KIB


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may have a higher priority")
@pytest.mark.parametrize(
    ("by", "nice"),
    [((), NICE), (("nice", "-n", "3"), 3), (("setpriv", "--bounding-set", "-sys_nice"), 0)],
    ids=["as it is", "with a nice value of its own", "where it may not"],
)
def test_it_goes_before_others_where_it_may(config: str, by: tuple[str, ...], nice: int) -> None:
    with started(config, by=by) as allocator:
        threads = [int(name) for name in os.listdir(f"/proc/{allocator.process.pid}/task")]
        values = {thread: os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
    assert values[allocator.process.pid] == nice
    # The watcher and libzmq's two; numpy's own, which have nothing to do, came before.
    assert list(values.values()).count(nice) > 3


def test_it_tells_its_parent_what_is_in_the_way_and_does_not_log_it_too(runtime_dir: Path, config: str) -> None:
    with started(config):
        alone = AllocatorConfig(runtime_dir).to_json()
        with started(alone) as second:
            assert second.process.wait(10) == 3
            assert second.told["exit"] == 3
            assert "another allocator (pid " in second.told["error"]
            assert second.process.stderr is not None
            assert second.process.stderr.read() == ""


def test_an_error_of_the_system_is_told_in_one_line_too(runtime_dir: Path) -> None:
    (runtime_dir / "ready").mkdir(parents=True)
    runtime_dir.chmod(0o700)
    with started(AllocatorConfig(runtime_dir).to_json()) as allocator:
        assert allocator.process.wait(10) == 1
        assert allocator.told["exit"] == 1
        assert str(runtime_dir / "ready") in allocator.told["error"]
    for command in ("serve", "allocator"):
        done = mambapool(command, "--dir", str(runtime_dir))
        assert done.returncode == 1
        assert str(runtime_dir / "ready") in done.stderr
        assert "Traceback" not in done.stderr


def test_a_configuration_that_is_none_is_a_usage_error() -> None:
    command = [sys.executable, "-m", "mambapool.service.allocator_process", '{"dir": "/tmp"}']
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "not the configuration of an allocator: 'pools'" in done.stderr, "nobody asked, so that it is logged"
    assert done.stderr.count("\n") == 1
