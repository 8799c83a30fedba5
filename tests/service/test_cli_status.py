"""``mambapool status`` as people and scripts see it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from daemons import SMALL_STATE, Daemon, mambapool

from mambapool.pool.runtime_dir import candidates

POOL_KEYS = {
    "name": str,
    "slots": int,
    "free": int,
    "held": int,
    "windows": int,
    "offered": int,
    "quarantined": int,
    "bytes_per_slot": int,
    "backend": str,
    "shards": int,
    "holders": list,
}
HOLDER_KEYS = {
    "session": int,
    "name": str,
    "pid": int,
    "group": type(None),
    "rank": int,
    "state": str,
    "held": int,
    "windows": int,
    "guarantee": int,
    "limit": int,
}
#: Of one rank's SMALL_STATE.
BYTES_PER_SLOT = 2 * 6 * 3 * 2 + 2 * 2 * 4 * 4 * 4

FILE = f"""
[[pool]]
pool = "two-shards"
slots = 12
state = {list(SMALL_STATE)}
tp-size = 2
[[pool]]
pool = "ids-only"
slots = 5
"""


@dataclass(frozen=True)
class Served:
    """A running daemon."""

    dir: Path
    allocator_pid: int


@pytest.fixture
def busy(daemon_factory: Any, runtime_dir: Path) -> Daemon:
    """Two pools from a file and one that a client made; three sessions hold slots, one of them in a window."""
    file = runtime_dir.with_suffix(".toml")
    file.write_text(FILE)
    daemon: Daemon = daemon_factory(slots=None, options=("--config", str(file)))
    first = daemon.connect(pool="two-shards", name="[/b] engine 0", rank=1)
    assert first.allocator.alloc(2) is not None
    first.allocator.alloc_group_begin(4)
    second = daemon.connect(pool="ids-only", name="engine-1")
    assert second.allocator.alloc(5) is not None
    daemon.connect(pool="made", name="engine-2", create_slots=3)
    return daemon


def only_keys(value: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    assert {key: type(value[key]) for key in keys} == keys
    return {key: value[key] for key in keys}


def test_status_shows_every_pool_its_counts_and_its_holders(busy: Daemon) -> None:
    two_shards_line = f"pool two-shards: 12 slots of {BYTES_PER_SLOT} bytes on 2 shards"
    assert busy.ready_line.endswith(f"{two_shards_line}, pool ids-only: 5 slots, allocator-only\n")
    done = mambapool("status", "--dir", str(busy.dir), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    status = json.loads(done.stdout)
    header = only_keys(status, {"epoch": int, "pid": int, "uptime_s": float, "pools": list})
    ready = busy.directory.read_ready()
    assert ready is not None
    assert (header["epoch"], header["pid"]) == (ready["epoch"], ready["pid"])
    assert ready["pools"] == ["ids-only", "two-shards"], "those that it was started with"
    assert 0 < header["uptime_s"] < 60

    pools = {pool["name"]: pool for pool in status["pools"]}
    assert sorted(pools) == ["ids-only", "made", "two-shards"]
    for pool in pools.values():
        counts = ("free", "held", "windows", "offered", "quarantined")
        assert sum(pool[key] for key in counts) == pool["slots"]

    two_shards = only_keys(pools["two-shards"], POOL_KEYS)
    (holder,) = two_shards.pop("holders")
    assert two_shards == {
        "name": "two-shards",
        "slots": 12,
        "free": 6,
        "held": 2,
        "windows": 4,
        "offered": 0,
        "quarantined": 0,
        "bytes_per_slot": BYTES_PER_SLOT,
        "backend": "shm",
        "shards": 2,
    }
    assert only_keys(holder, HOLDER_KEYS) == {
        "session": busy.workers[0].session,
        "name": "[/b] engine 0",
        "pid": os.getpid(),
        "group": None,
        "rank": 1,
        "state": "live",
        "held": 2,
        "windows": 4,
        "guarantee": 0,
        "limit": 12,
    }
    allocator_only = pools["ids-only"]
    assert (allocator_only["bytes_per_slot"], allocator_only["backend"], allocator_only["shards"]) == (0, None, 0)
    assert (allocator_only["free"], allocator_only["held"]) == (0, 5)

    table = mambapool("status", "--dir", str(busy.dir))
    assert (table.returncode, table.stderr) == (0, "")
    lines = [line.split() for line in table.stdout.splitlines()]
    assert f"allocator pid {ready['pid']}, epoch {ready['epoch']}, up" in table.stdout
    assert ["two-shards", "12", "6", "2", "4", "0", "0", "2", "×", f"{BYTES_PER_SLOT}", "bytes"] in lines
    assert ["ids-only", "5", "0", "5", "0", "0", "0", "allocator-only"] in lines
    pid = str(os.getpid())
    session = str(busy.workers[0].session)
    assert ["two-shards", session, "[/b]", "engine", "0", pid, "1", "live", "2", "4"] in lines


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A daemon whose every setting comes from the environment."""
    with tempfile.TemporaryDirectory(prefix="mambapool-") as parent:
        directory = Path(parent, "run")
        settings = {"DIR": str(directory), "SLOTS": "6", "STATE": " ".join(SMALL_STATE), "POOL": "env"}
        environment = {f"MAMBAPOOL_{name}": value for name, value in settings.items()}
        with Command("serve", **environment) as command:
            line = command.ready_line()
            assert line.endswith(f"pool env: 6 slots of {BYTES_PER_SLOT} bytes\n")
            yield Served(directory, json.loads((directory / "ready").read_text())["pid"])


def test_status_finds_the_directory_in_the_environment(served: Served) -> None:
    by_environment = mambapool("status", "--json", MAMBAPOOL_DIR=str(served.dir))
    assert json.loads(by_environment.stdout)["pid"] == served.allocator_pid
    by_flag = mambapool("status", "--dir", str(served.dir), MAMBAPOOL_DIR="/nowhere", MAMBAPOOL_JSON="1")
    assert json.loads(by_flag.stdout)["pid"] == served.allocator_pid


def test_a_reader_that_goes_away_causes_no_traceback(served: Served) -> None:
    for options in ("", "--json"):
        shell = f"{sys.executable} -m mambapool.service status --dir {served.dir} {options} | head -c 1"
        done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
        assert (done.returncode, len(done.stdout), done.stderr) == (0, 1, "")

    # So that the first write already finds nobody.
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "mambapool.service", "status", "--dir", str(served.dir)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_allocator_that_does_not_answer_is_not_reachable_within_the_timeout(served: Served) -> None:
    os.kill(served.allocator_pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        done = mambapool("status", "--dir", str(served.dir), "--timeout", "300ms")
    finally:
        os.kill(served.allocator_pid, signal.SIGCONT)
    assert time.monotonic() - began < 10, "300 ms, and the time that a process takes to start"
    assert done.returncode == 4
    assert str(served.dir) in done.stderr
    assert "did not answer within 0.3 s" in done.stderr
    assert done.stderr.count("\n") == 1


def test_where_nobody_is_the_directory_that_was_looked_at_is_named(runtime_dir: Path) -> None:
    done = mambapool("status", "--dir", str(runtime_dir), MAMBAPOOL_DIR="/nowhere")
    assert (done.returncode, done.stdout) == (4, "")
    assert f"no daemon is ready in {runtime_dir}: start one with `mambapool serve`" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not runtime_dir.exists(), "a look made the directory"


def test_where_none_is_named_every_usual_directory_is_looked_at(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MAMBAPOOL_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    if any((place / "ready").exists() for place in candidates()):
        pytest.skip("a daemon serves one of the usual directories of this machine")
    done = mambapool("status")
    assert done.returncode == 4
    usual = f"{runtime_dir}/mambapool or /run/mambapool or /tmp/mambapool-{os.getuid()}"
    assert f"no daemon is ready in {usual}: " in done.stderr


def test_what_a_killed_daemon_left_is_not_taken_for_a_daemon(daemon: Daemon) -> None:
    allocator = daemon.allocator_pid
    daemon.process.kill()
    os.kill(allocator, 9)
    daemon.process.wait(10)
    assert (daemon.dir / "ready").exists()
    done = mambapool("status", "--dir", str(daemon.dir), "--timeout", "100ms")
    assert done.returncode == 4
    assert "did not answer" in done.stderr
