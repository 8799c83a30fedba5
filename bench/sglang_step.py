"""Goal 8: a scheduling step of SGLang's own callers, cache full, on a guarantee, against SGLang's own allocator.

Prints a JSON list of results. Needs SGLang's wheel (``make peers`` gets it): without it the list is empty, and
stderr says why. ``--seconds`` bounds the measuring, 20 by default.

One process has three engines with the same seed: two with SGLang's allocator, one with mambapool's. They take
turns, in random order, so that all three meet the same machine. A step's time is this thread's processor time,
which other processes do not add to: nothing in it waits, as the count of messages shows. Its ratio is that of a
round of steps, the result the median over the rounds. Calls are too short for that clock: theirs is wall time
without each method's slowest twentieth. The ratio of the two equal engines shows what the machine adds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

CHECKOUT = Path(__file__).parent.parent

if TYPE_CHECKING:
    from sglang_scheduler import Engine

STEPS_PER_ROUND = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds = parser.parse_args().seconds
    sys.path.insert(0, str(CHECKOUT / "tests" / "support"))
    import sglang_wheel
    from daemons import start_daemon

    if reason := sglang_wheel.missing():
        print(f"goal 8 skipped: {reason}", file=sys.stderr)
        print("[]")
        return 0
    with tempfile.TemporaryDirectory(prefix="mambapool-bench-") as folder:
        daemon = start_daemon(Path(folder, "run"), slots=None)
        try:
            environment = sglang_wheel.environment(CHECKOUT / "bench") | {"MAMBAPOOL_DIR": str(daemon.dir)}
            command = [sys.executable, __file__, "--in-sglang", str(seconds)]
            return subprocess.run(command, env=environment, check=False).returncode
        finally:
            daemon.close()


def in_sglang(seconds: float) -> int:
    """In a process that has SGLang: measure, and print."""
    import sglang_scheduler

    from mambapool.client.sglang import install

    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[-1:])
    results: list[dict[str, Any]] = []
    made: dict[bool, list[Engine]] = {tracks: [] for tracks in (False, True)}
    for tracks, engines in made.items():
        engines += [sglang_scheduler.Engine(tracks=tracks, seed=8) for _ in range(2)]
    install()
    for tracks, engines in made.items():
        engines.append(sglang_scheduler.Engine(tracks=tracks, seed=8))
        results += _measured(engines, "with track slots" if tracks else "one slot per request", seconds / 2)
    print(json.dumps(results, indent=1))
    return 0


def _measured(engines: list[Engine], kind: str, seconds: float) -> list[dict[str, Any]]:
    worker = engines[-1].pool.mamba_allocator._worker
    before = worker.messages
    rounds = [_take_turns([(engine, engine.step) for engine in engines]) for _ in _until(seconds / 2)]
    _, again, ours = (statistics.median(ratios) for ratios in zip(*map(_ratios, rounds), strict=True))
    timed = [Timed(engine) for engine in engines]
    steps = len([_take_turns([(each.engine, each.step) for each in timed]) for _ in _until(seconds / 2)])
    _, again_inside, ours_inside = _ratios([each.seconds for each in timed])
    for engine in engines:
        engine.check()
    batch = f"SGLang's step, 8 requests, cache full, {kind}"
    calls = timed[-1].calls // (steps * STEPS_PER_ROUND)
    return [
        _result(f"{batch}: messages", worker.messages - before, 0),
        _result(f"{batch}: time / with SGLang's allocator (again with SGLang's: {again:.3f})", ours, 1.0),
        _result(
            f"{batch}: of it, in {calls} calls / in SGLang's allocator ({again_inside:.3f})", ours_inside, 1.0
        ),
    ]


def _until(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield


def _take_turns(players: list[tuple[Engine, Callable[[], None]]]) -> list[float]:
    """Some steps of each, in random order: the time that each has taken."""
    times = [0.0] * len(players)
    turns = [*range(len(players))] * STEPS_PER_ROUND
    random.shuffle(turns)
    for turn in turns:
        engine, step = players[turn]
        engine.prepare()
        start = time.thread_time()
        step()
        times[turn] += time.thread_time() - start
    return times


def _ratios(times: list[float]) -> list[float]:
    return [spent / times[0] for spent in times]


class Timed:
    """Steps of an engine whose allocator's calls are timed where SGLang makes them, not where it calls itself."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._allocator = engine.pool.mamba_allocator
        self._spent: dict[str, list[float]] = {}
        for name in (
            "available_size", "schedulable_available_size", "alloc", "free", "alloc_group_begin", "alloc_group_end",
        ):  # fmt: skip
            setattr(self, name, self._timed(name))

    def step(self) -> None:
        self.engine.pool.mamba_allocator = self
        self.engine.step()
        self.engine.pool.mamba_allocator = self._allocator

    @property
    def calls(self) -> int:
        return sum(map(len, self._spent.values()))

    @property
    def seconds(self) -> float:
        """Of all calls; those that the machine interrupted, each method's slowest twentieth, as if like the rest."""
        return sum(
            statistics.fmean(sorted(spent)[: -(-len(spent) * 19 // 20)]) * len(spent)
            for spent in self._spent.values()
            if spent
        )

    def _timed(self, name: str) -> Callable[..., Any]:
        clock, call = time.perf_counter, getattr(self._allocator, name)
        spent = self._spent.setdefault(name, [])

        def timed(*arguments: Any) -> Any:
            start = clock()
            answer = call(*arguments)
            spent.append(clock() - start)
            return answer

        return timed


def _result(name: str, value: float, limit: float) -> dict[str, Any]:
    value = round(value, 3)
    return {"goal": 8, "name": name, "value": value, "limit": limit, "better": "lower", "met": value <= limit}


if __name__ == "__main__":
    sys.exit(in_sglang(float(sys.argv[2])) if sys.argv[1:2] == ["--in-sglang"] else main())
