"""``connect()``: finds its daemon, within its timeout, or says where it looked."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemons import wait_until
from fresh_pool import FreshPool, FreshPoolFactory, granted

from mambapool.client import connect
from mambapool.client.transport import Transport
from mambapool.pool.errors import AllocatorUnavailable, ConfigError, UnknownPool, VersionMismatch
from mambapool.pool.runtime_dir import RuntimeDir

TIMEOUT_S = 0.3
GRACE_S = 0.5


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(8)


def unavailable(call: Callable[[], object]) -> str:
    """What the call says when it raises, in time."""
    began = time.monotonic()
    with pytest.raises(AllocatorUnavailable) as caught:
        call()
    assert TIMEOUT_S <= time.monotonic() - began < TIMEOUT_S + GRACE_S
    return str(caught.value)


def test_without_a_daemon_it_names_the_directory_and_what_to_do(tmp_path: Path) -> None:
    text = unavailable(lambda: connect(tmp_path / "run", timeout=TIMEOUT_S))
    assert all(word in text for word in (str(tmp_path / "run"), "0.3 s", "mambapool serve"))


def test_without_a_daemon_it_names_every_place_that_it_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = [tmp_path / "mambapool", Path("/run/mambapool"), Path(f"/tmp/mambapool-{os.getuid()}")]
    if any((place / "ready").exists() for place in usual):
        pytest.skip("a daemon runs in one of the usual places of this machine")
    monkeypatch.delenv("MAMBAPOOL_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    text = unavailable(lambda: connect(timeout=TIMEOUT_S))
    assert all(str(place) in text for place in usual)


def test_a_daemon_that_left_its_ready_file_behind_is_not_waited_for_longer(tmp_path: Path) -> None:
    directory = RuntimeDir.for_server(tmp_path / "run").path
    (directory / "ready").write_text("{}")
    text = unavailable(lambda: connect(directory, timeout=TIMEOUT_S))
    assert str(directory) in text


def test_waiting_for_a_daemon_and_for_its_answer_share_one_timeout(tmp_path: Path) -> None:
    directory = RuntimeDir.for_server(tmp_path / "run").path
    timer = threading.Timer(0.7, (directory / "ready").write_text, ("{}",))
    timer.start()
    began = time.monotonic()
    with pytest.raises(AllocatorUnavailable):
        connect(directory, timeout=1.0)
    assert time.monotonic() - began < 1.0 + GRACE_S
    timer.join()


def test_a_daemon_that_comes_up_meanwhile_is_taken(pool: FreshPool, tmp_path: Path) -> None:
    late = tmp_path / "late"
    timer = threading.Timer(0.1, late.symlink_to, (pool.daemon.dir,))
    timer.start()
    with connect(late, pool.name) as worker:
        assert worker.allocator.alloc(1) is not None
    timer.join()


def test_the_environment_names_the_directory(pool: FreshPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAMBAPOOL_DIR", str(pool.daemon.dir))
    with connect(pool=pool.name) as worker:
        assert worker.allocator.size == 8


def test_an_unknown_pool_is_named_with_those_that_there_are(pool: FreshPool) -> None:
    with pytest.raises(UnknownPool, match=rf"'other'.*{pool.name}"):
        connect(pool.daemon.dir, "other")


@pytest.mark.parametrize("name", ["", "A", "a b", "../x", "x" * 33, 7, None])
def test_a_pool_name_that_none_can_have_is_refused_unsent(pool: FreshPool, name: Any) -> None:
    with pytest.raises(ConfigError, match="pool name"):
        connect(pool.daemon.dir, name)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_a_timeout_that_is_none_is_refused(pool: FreshPool, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        pool.connect(timeout=timeout)


@pytest.mark.parametrize("versions", [[2, 9], [0, 0]])
def test_a_client_of_other_versions_is_refused_with_both_ranges(pool: FreshPool, versions: list[int]) -> None:
    hello = {"versions": versions, "lease": b"l" * 16, "pool": pool.name, "name": "other", "pid": 1, "rank": 0}
    expected = rf"version: the client speaks {versions[0]} to {versions[1]}, the allocator 1 to 1"
    with pytest.raises(VersionMismatch, match=expected):
        Transport(pool.daemon.directory, 1.0, hello)
    assert len(pool.status()["holders"]) == 1


def test_sessions_have_numbers_of_their_own_and_leave_nothing_open(pool: FreshPool) -> None:
    def descriptors(pid: int) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    def connect_and_close() -> int:
        with connect(pool.daemon.dir, pool.name) as worker:
            slot = granted(worker.allocator.alloc(1))
            worker.allocator.free(slot)
        return worker.session

    connect_and_close()
    pids = os.getpid(), pool.daemon.allocator_pid
    before = [descriptors(pid) for pid in pids]
    assert len({connect_and_close() for _ in range(200)}) == 200
    most = [then + 5 for then in before]
    # Waited for: zmq closes in a thread of its own.
    wait_until(lambda: all(map(int.__le__, map(descriptors, pids), most)), "both processes have closed them")
