"""Schedulers as processes of their own, on the pool of a real daemon, over a real trace."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemons import SMALL_STATE, Daemon, mambapool

from mambapool.client.replay.command import run_replay
from mambapool.client.replay.failure import ReplayFailed
from mambapool.client.replay.options import ReplayOptions
from mambapool.pool.errors import AllocatorUnavailable, ConfigError

TRACE = Path(__file__).parents[2] / "bench/traces/mooncake_conversation_trace.jsonl.gz"

AZURE = TRACE.with_name("azure_llm_2023_conv_first_2000.csv")

DaemonFactory = Callable[..., Daemon]


@pytest.fixture
def daemon_with_states(daemon_factory: DaemonFactory) -> Daemon:
    return daemon_factory(slots=300, states=SMALL_STATE)


def options_for(daemon: Daemon, **changes: Any) -> ReplayOptions:
    return ReplayOptions(**{"trace": TRACE, "dir": daemon.dir, "schedulers": 2, "limit": 60, **changes})


def unwatched(finished: int, total: int) -> None:
    pass


def schedulers_of(daemon: Daemon) -> dict[str, int]:
    """The pids of the schedulers that are connected, by name."""
    return {holder["name"]: holder["pid"] for holder in daemon.pool()["holders"]}


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_schedulers_share_a_pool_over_the_shipped_trace(daemon_with_states: Daemon) -> None:
    seen: list[tuple[int, int]] = []
    summary = run_replay(options_for(daemon_with_states), lambda *counts: seen.append(counts))
    assert summary.ok
    assert (summary.requests, summary.finished, summary.mismatches, summary.waits) == (60, 60, 0, 0)
    assert summary.messages <= 0.3 * summary.steps
    assert 0 < summary.mean_held < summary.peak_held <= summary.partitioned_sum <= summary.partitioned_need
    assert summary.partitioned_need <= summary.slots == 300
    assert seen[-1] == (60, 60)
    assert seen == sorted(seen)
    pool = daemon_with_states.pool()
    assert (pool["free"], pool["holders"]) == (300, [])


@pytest.mark.heavy
def test_several_traces_have_a_scheduler_each(daemon_with_states: Daemon, tmp_path: Path) -> None:
    options = options_for(daemon_with_states, trace=AZURE, more_traces=(TRACE,), limit=25)
    picture = tmp_path / "picture.png" if importlib.util.find_spec("matplotlib") else None
    summary = run_replay(options, unwatched, picture)
    assert summary.ok
    assert (summary.requests, summary.finished, summary.schedulers) == (50, 50, 2)
    assert picture is None or picture.stat().st_size > 10_000


@pytest.mark.heavy
def test_a_pool_that_is_too_small_for_all_makes_requests_wait_and_serves_them(
    daemon_factory: DaemonFactory,
) -> None:
    daemon = daemon_factory(slots=8, states=SMALL_STATE)
    summary = run_replay(options_for(daemon, limit=30, route="prefix"), unwatched)
    assert summary.ok
    assert summary.waits > 0
    assert 3 <= summary.peak_held <= summary.slots == 8
    assert summary.messages <= 0.3 * summary.steps
    assert daemon.pool()["free"] == 8


@pytest.mark.heavy
def test_schedulers_may_be_groups_of_ranks_that_wait_for_slots_alike(daemon_factory: DaemonFactory) -> None:
    daemon = daemon_factory(slots=8, states=SMALL_STATE, options=("--tp-size", "2"))
    summary = run_replay(options_for(daemon, limit=20, tp_size=2), unwatched)
    assert summary.ok
    assert (summary.finished, summary.mismatches) == (20, 0)
    assert summary.waits > 0
    assert summary.rank_messages[1] == 0
    assert 0 < summary.messages <= 0.3 * summary.steps
    pool = daemon.pool()
    assert (pool["free"], pool["holders"]) == (8, [])


@pytest.mark.heavy
def test_equal_replays_of_groups_find_equal_figures_on_a_pool_that_is_just_large_enough(
    daemon_factory: DaemonFactory,
) -> None:
    """The ranks of a scheduler go in step: what lies in limbo is what an engine's would have there."""
    daemon = daemon_factory(slots=124, states=SMALL_STATE, options=("--tp-size", "2"))
    runs = [run_replay(options_for(daemon, limit=200, tp_size=2), unwatched) for _ in range(3)]
    found = [
        (run.waits, run.steps, run.peak_held, run.mean_held, run.partitioned_need, run.partitioned_sum)
        for run in runs
    ]
    assert found[0] == found[1] == found[2]
    assert (runs[0].waits, runs[0].in_step, runs[0].partitioned_sum) == (0, True, 123)


def test_a_group_with_a_guarantee_sends_no_message(daemon_factory: DaemonFactory) -> None:
    daemon = daemon_factory(slots=90, states=SMALL_STATE, options=("--tp-size", "2"))
    summary = run_replay(options_for(daemon, schedulers=1, limit=30, tp_size=2, guarantee=80), unwatched)
    assert summary.ok
    assert (summary.finished, summary.waits, summary.rank_messages) == (30, 0, (0, 0))


def test_ranks_need_a_shard_each(daemon_with_states: Daemon) -> None:
    done = mambapool("replay", str(TRACE), "--dir", str(daemon_with_states.dir), "--tp-size", "2")
    assert done.returncode == 2
    assert "--tp-size 2: pool default has 1 shards: serve it with as many" in done.stderr


def test_a_guarantee_below_what_a_request_takes_is_refused(daemon_with_states: Daemon) -> None:
    with pytest.raises(ConfigError, match=r"--guarantee 2: a request takes 3 slots"):
        run_replay(options_for(daemon_with_states, schedulers=1, guarantee=2), unwatched)


def test_a_slot_granted_twice_is_reported_with_exit_status_1(daemon_factory: DaemonFactory) -> None:
    daemon = daemon_factory(slots=300, states=SMALL_STATE, environment={"MAMBAPOOL_FAULT": "double-grant:50"})
    done = mambapool(
        *("replay", str(TRACE), "--dir", str(daemon.dir), "--schedulers", "2", "--limit", "60", "--json")
    )
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert result["mismatches"] > 0
    assert result["finished"] == result["requests"] == 60
    doubled = re.search(r"fault: slot (\d+) of session", daemon.log)
    assert doubled is not None
    assert any(re.search(rf"\b{doubled[1]}\b", line) for line in result["findings"])
    assert "Traceback" not in done.stderr
    # The pool's books are wrong on purpose: end it before it is checked.
    daemon.stop()


def test_a_request_that_the_pool_can_never_serve_is_refused_at_start(daemon_factory: DaemonFactory) -> None:
    daemon = daemon_factory(slots=2, states=SMALL_STATE)
    with pytest.raises(ConfigError, match=r"has 2 slots, and a request takes 3 \(1 and --track 2\)"):
        run_replay(options_for(daemon, schedulers=1), unwatched)
    assert daemon.pool()["holders"] == []


def test_a_pool_without_states_is_refused_at_start(daemon: Daemon) -> None:
    with pytest.raises(ConfigError, match="has no states"):
        run_replay(options_for(daemon, schedulers=1), unwatched)


def test_without_a_daemon_the_error_is_that_of_connect(tmp_path: Path) -> None:
    options = ReplayOptions(TRACE, tmp_path, schedulers=1, timeout=0.1)
    with pytest.raises(AllocatorUnavailable, match=r"scheduler 0 .*no daemon is ready"):
        run_replay(options, unwatched)


def test_a_scheduler_that_dies_fails_the_run_and_leaves_no_process(daemon_with_states: Daemon) -> None:
    pids: dict[str, int] = {}

    def kill_one(finished: int, total: int) -> None:
        if not pids:
            pids.update(schedulers_of(daemon_with_states))
            os.kill(pids["replay-1"], signal.SIGKILL)

    with pytest.raises(ReplayFailed, match=r"scheduler 1 \(pid \d+\) was ended by SIGKILL without a result"):
        run_replay(options_for(daemon_with_states, limit=200, speed=1.0), kill_one)
    assert len(pids) == 2
    assert not any(map(is_running, pids.values()))


def test_an_interrupted_replay_ends_its_schedulers_and_gives_everything_back(
    daemon_with_states: Daemon,
) -> None:
    pids: dict[str, int] = {}

    def interrupt(finished: int, total: int) -> None:
        pids.update(schedulers_of(daemon_with_states))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_replay(options_for(daemon_with_states, limit=200, speed=1.0), interrupt)
    assert len(pids) == 2
    assert not any(map(is_running, pids.values()))
    assert daemon_with_states.pool()["free"] == 300


def test_slots_that_others_keep_for_themselves_end_the_replay(daemon_with_states: Daemon) -> None:
    other = daemon_with_states.connect(name="other")
    assert other.allocator.alloc(298) is not None
    with pytest.raises(ReplayFailed, match=r"nothing runs, and for .* others hold the slots of pool default"):
        run_replay(options_for(daemon_with_states, schedulers=1, timeout=0.5), unwatched)


@pytest.mark.heavy
def test_speed_holds_the_schedulers_to_the_clock_of_the_trace(daemon_with_states: Daemon, tmp_path: Path) -> None:
    trace = tmp_path / "two.jsonl"
    request = {"input_length": 1, "output_length": 2, "hash_ids": []}
    trace.write_text("".join(json.dumps({"timestamp": ms, **request}) + "\n" for ms in (0, 2000)))
    summary = run_replay(
        options_for(daemon_with_states, trace=trace, schedulers=1, limit=None, speed=4.0), unwatched
    )
    assert summary.ok
    # The last step begins at 2030 ms of the trace.
    assert summary.seconds >= 2.03 / 4
