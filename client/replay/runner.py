"""Running the schedulers of a replay: a process for each rank of each, started or joined, watched to the end."""

from __future__ import annotations

import secrets
import selectors
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from mambapool.client.replay.failure import ReplayFailed, raised_by
from mambapool.client.replay.joining import JoinedScheduler, joined_schedulers
from mambapool.client.replay.messages import Failed, Job, Loaded, Progress, Ready, Report
from mambapool.client.replay.options import ReplayOptions
from mambapool.client.replay.result import SchedulerResult
from mambapool.client.replay.scheduler_process import SchedulerProcess
from mambapool.client.replay.watch import Watch
from mambapool.pool.errors import ConfigError

_Report = TypeVar("_Report", Loaded, Ready)
_Process = SchedulerProcess | JoinedScheduler

#: Seconds that a scheduler has to end in when it was asked to, or has sent its result. It ends between two
#: steps, and closing its session is bounded by the client.
_END_S = 10.0

#: Seconds between two looks at whether the schedulers still get anywhere.
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Run:
    """What the schedulers found out, on a pool of ``slots`` slots, in ``seconds`` of real time.

    ``results`` are the schedulers', their ranks one after the other.
    """

    results: list[SchedulerResult]
    slots: int
    seconds: float


def run_schedulers(options: ReplayOptions, progress: Callable[[int], None]) -> Run:
    """Start the schedulers, or let them join, wait until all are connected, let them run, and collect what they report.

    ``progress`` is called with the number of requests finished so far, from this thread. No process is left
    behind, whatever happens. Raises the error that a scheduler reports, :class:`ConfigError` when the pool
    can never serve a request or has no states, and :class:`ReplayFailed`.
    """
    with _Schedulers(options) as schedulers:
        schedulers.start()
        slots = schedulers.until_ready()
        started_s = time.monotonic()
        schedulers.go(started_s)
        results = schedulers.until_done(progress)
        return Run(results, slots, max(schedulers.result_times_s) - started_s)


def jobs_of(options: ReplayOptions) -> list[Job]:
    """One for each rank of each scheduler. Their groups' names are of this replay alone: others may run on the same
    daemon, also from other containers, where they have the same pid."""
    replay = secrets.token_hex(4)
    return [
        Job(scheduler, options, rank, f"replay-{replay}-{scheduler}" if options.tp_size > 1 else None)
        for scheduler in range(options.schedulers)
        for rank in range(options.tp_size)
    ]


class _Schedulers:
    """The processes of one replay; leaving the context ends those that still run."""

    def __init__(self, options: ReplayOptions) -> None:
        self._options = options
        self._selector = selectors.DefaultSelector()
        self._processes: list[_Process] = []
        self._results: dict[tuple[int, int], SchedulerResult] = {}
        self.result_times_s: list[float] = []

    def __enter__(self) -> _Schedulers:
        return self

    def start(self) -> None:
        jobs = jobs_of(self._options)
        for process in (
            joined_schedulers(self._options, jobs) if self._options.elsewhere else map(SchedulerProcess, jobs)
        ):
            self._add(process)

    def _add(self, process: _Process) -> None:
        self._processes.append(process)
        self._selector.register(process, selectors.EVENT_READ, process)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for process in self._processes:
            process.ask_to_end()
        deadline_s = time.monotonic() + _END_S
        for process in self._processes:
            if process.wait(max(0.0, deadline_s - time.monotonic())) is None:
                process.kill()
                if error is not None:
                    error.add_note(f"{process} did not end within {_END_S:g} s and was killed")
            process.close()
        self._selector.close()

    def until_ready(self) -> int:
        """Wait until all are connected; returns the number of slots of the pool."""
        if self._options.tp_size > 1:
            self._until_all_say(Loaded)
            self.go(time.monotonic())
        ready = self._until_all_say(Ready)
        _check_pool(self._options, ready)
        return ready.slots

    def go(self, origin_s: float) -> None:
        for process in self._processes:
            process.go(origin_s)

    def until_done(self, progress: Callable[[int], None]) -> list[SchedulerResult]:
        """Wait until all have reported their result and ended; the results are in the schedulers' order."""
        watch = Watch(self._options)
        while self._selector.get_map():
            for process, report in self._receive():
                if isinstance(report, SchedulerResult):
                    self._results[process.scheduler, process.rank] = report
                    self.result_times_s.append(time.monotonic())
                if process.rank:
                    continue  # as far as rank 0
                if isinstance(report, Progress):
                    watch.note(process.scheduler, report)
                elif isinstance(report, SchedulerResult):
                    watch.note_end(process.scheduler, report.finished)
            progress(watch.finished)
            watch.check()
        return [self._results[process] for process in sorted(self._results)]

    def _until_all_say(self, kind: type[_Report]) -> _Report:
        """Wait until every process has sent one such report; one of them."""
        told: dict[tuple[int, int], _Report] = {}
        while len(told) < len(self._processes):
            for process, report in self._receive():
                if isinstance(report, kind):
                    told[process.scheduler, process.rank] = report
        return told[0, 0]

    def _receive(self) -> Iterator[tuple[_Process, Report]]:
        """What has come within :data:`_LOOK_S`. Raises when a scheduler failed, or ended too early."""
        for key, _ in self._selector.select(_LOOK_S):
            process: _Process = key.data
            reports = process.read()
            if reports is None:
                self._selector.unregister(process)
                self._check_end(process)
            for report in reports or ():
                if isinstance(report, Failed):
                    raise raised_by(str(process), report)
                yield process, report

    def _check_end(self, process: _Process) -> None:
        status = process.wait(_END_S)
        has_result = (process.scheduler, process.rank) in self._results
        if has_result and status == 0:
            return
        when = "after its result" if has_result else "without a result"
        words = process.last_words()
        raise ReplayFailed(f"{process} {process.how_it_ended(status)} {when}{': ' if words else ''}{words}")


def _check_pool(options: ReplayOptions, pool: Ready) -> None:
    if options.slots_per_request > options.guarantee > 0:
        raise ConfigError(
            f"--guarantee {options.guarantee}: a request takes {options.slots_per_request} slots (1 and --track "
            f"{options.track}): guarantee more, or ask for fewer track slots"
        )
    if options.slots_per_request > pool.slots:
        raise ConfigError(
            f"pool {options.pool} has {pool.slots} slots, and a request takes {options.slots_per_request} "
            f"(1 and --track {options.track}): serve a larger pool, or ask for fewer track slots"
        )
    if not pool.tensors:
        raise ConfigError(
            f"pool {options.pool} has no states, so there is nothing to compute on and to compare: "
            "serve it with --state or --model"
        )
