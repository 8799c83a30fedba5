"""The process of one scheduler of a replay: ``python -m mambapool.client.replay.worker_process``.

Started by :mod:`~mambapool.client.replay.runner`, or joined to it by ``mambapool scheduler``; talks to it as
:mod:`~mambapool.client.replay.messages` says. SIGTERM and SIGINT end it between two steps; it also ends by
itself when nobody reads its reports any more.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import BinaryIO

import torch

from mambapool.client import Worker, connect
from mambapool.client.group_calls import GroupCalls
from mambapool.client.replay.messages import Failed, Go, Job, Loaded, Progress, Ready, Report, report_line
from mambapool.client.replay.options import ReplayOptions
from mambapool.client.replay.pace import Pace
from mambapool.client.replay.result import SchedulerResult
from mambapool.client.replay.scheduler import Scheduler
from mambapool.client.replay.shares import requests_of
from mambapool.pool.errors import MambaPoolError
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.pool.slot_table import SlotTableReader

#: Seconds between two reports of progress.
_REPORT_EVERY_S = 0.1

#: Seconds, from and to, that a scheduler sleeps which waits for others to free slots. At random, so that two
#: that want the same last slots do not go on taking some of them each in step.
_BLOCKED_SLEEP_S = (0.0003, 0.0009)


class _Stopped(Exception):
    """A signal asked for the end."""


class _Reporter:
    """Tells the runner how far the scheduler is, at most every :data:`_REPORT_EVERY_S`."""

    def __init__(self, output: BinaryIO) -> None:
        self._output = output
        self._due_s = 0.0
        self._stopped = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True

    def send(self, report: Report) -> None:
        self._output.write(report_line(report))
        self._output.flush()

    def tick(self, scheduler: Scheduler, blocked: bool) -> None:
        """Report if it is time; raises :class:`_Stopped` when a signal came."""
        if self._stopped:
            raise _Stopped
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + _REPORT_EVERY_S
            self.send(Progress(scheduler.finished, scheduler.steps, blocked))


def main() -> int:
    job_line = sys.stdin.buffer.readline()
    if not job_line:
        return 1
    job = Job.from_line(job_line)
    reporter = _Reporter(_take_stdout())
    try:
        result = _run(job, reporter)
    except MambaPoolError as error:
        reporter.send(Failed(type(error).__name__, str(error)))
        return 1
    except (_Stopped, ConnectionError):
        return 1
    reporter.send(result)
    return 0


def _take_stdout() -> BinaryIO:
    """Keep the pipe for the reports alone: whatever else is printed goes to standard error."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return output


def _run(job: Job, reporter: _Reporter) -> SchedulerResult:
    options = job.options
    torch.set_num_threads(1)
    requests = requests_of(options, job.scheduler)
    if job.group is not None:
        reporter.send(Loaded())
        _next_go()
    with connect(
        options.dir,
        options.pool,
        name=f"replay-{job.scheduler}",
        device=options.device,
        timeout=options.timeout,
        rank=job.rank,
        world_size=options.tp_size,
        group=job.group,
        guarantee=options.guarantee,
    ) as worker:
        rows = next((states.shape[1] for states in worker.states.values()), 0)
        reporter.send(Ready(rows - 1 if rows else worker.allocator.size, len(worker.states)))
        go = _next_go()
        table = _table_of(options)
        in_use = lambda: table.layout.slots - table.free_count  # noqa: E731
        scheduler = Scheduler(worker, requests, options.track, options.step_ms, in_use)
        pace = Pace(options.speed, go.origin_s)
        _step_through(scheduler, pace, reporter, random.Random(job.scheduler), _meeting_of(worker))
        return scheduler.finish()


def _table_of(options: ReplayOptions) -> SlotTableReader:
    directory = RuntimeDir.for_client(options.dir)
    assert directory is not None, "it is connected there"
    return SlotTableReader(directory.slot_table(options.pool))


def _meeting_of(worker: Worker) -> Callable[[], None]:
    """How a rank waits for the others of its scheduler, once a step: as an engine's do in their all-reduces.

    Else those that wait for nobody run ahead, what they free stays in the group's limbo until the last one has come,
    and how many slots that is differs from run to run.
    """
    return worker.allocator.meet if isinstance(worker.allocator, GroupCalls) else lambda: None


def _next_go() -> Go:
    line = sys.stdin.buffer.readline()
    if not line:
        raise _Stopped
    return Go.from_line(line)


def _step_through(
    scheduler: Scheduler, pace: Pace, reporter: _Reporter, chance: random.Random, meet: Callable[[], None]
) -> None:
    blocked = False
    while not scheduler.done:
        pace.hold(scheduler.clock_ms, partial(reporter.tick, scheduler, blocked))
        blocked = not scheduler.step()
        reporter.tick(scheduler, blocked)
        meet()
        if blocked:
            time.sleep(chance.uniform(*_BLOCKED_SLEEP_S))


if __name__ == "__main__":
    status = main()
    # Nothing is left to close: the session has ended, and every report was flushed. The interpreter would
    # spend up to a second of processor time on taking torch down.
    os._exit(status)
