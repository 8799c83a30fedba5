from __future__ import annotations

import time
from pathlib import Path

import pytest

from mambapool.client.replay.failure import ReplayFailed
from mambapool.client.replay.messages import Progress
from mambapool.client.replay.options import ReplayOptions
from mambapool.client.replay.watch import Watch

TIMEOUT_S = 0.05


@pytest.fixture
def watch() -> Watch:
    return Watch(ReplayOptions(Path("trace.jsonl"), schedulers=2, timeout=TIMEOUT_S))


def check_past_the_timeout(watch: Watch, *reports: tuple[int, Progress]) -> None:
    """Look for longer than the timeout, with the same reports coming in."""
    deadline_s = time.monotonic() + 2 * TIMEOUT_S
    while time.monotonic() < deadline_s:
        for scheduler, report in reports:
            watch.note(scheduler, report)
        watch.check()


def test_schedulers_that_all_wait_for_slots_too_long_are_an_error(watch: Watch) -> None:
    waiting = Progress(3, 40, blocked=True)
    with pytest.raises(ReplayFailed, match=r"no scheduler got the 3 slots .* of pool default"):
        check_past_the_timeout(watch, (0, waiting), (1, waiting))


def test_one_that_runs_will_give_slots_back(watch: Watch) -> None:
    check_past_the_timeout(watch, (0, Progress(3, 40, blocked=True)), (1, Progress(3, 40, blocked=False)))


def test_steps_between_two_reports_count_though_both_tell_of_waiting(watch: Watch) -> None:
    deadline_s = time.monotonic() + 2 * TIMEOUT_S
    steps = 0
    while time.monotonic() < deadline_s:
        steps += 1
        watch.note(0, Progress(0, steps, blocked=True))
        watch.check()


def test_one_that_has_ended_holds_nothing_that_could_be_waited_for(watch: Watch) -> None:
    watch.note(1, Progress(3, 40, blocked=False))
    watch.note_end(1, 5)
    with pytest.raises(ReplayFailed):
        check_past_the_timeout(watch, (0, Progress(3, 40, blocked=True)))


def test_finished_requests_are_those_of_the_running_and_of_the_ended(watch: Watch) -> None:
    watch.note(0, Progress(3, 40, blocked=False))
    watch.note(1, Progress(4, 40, blocked=False))
    watch.note_end(1, 9)
    assert watch.finished == 12


def test_when_all_have_ended_nobody_waits(watch: Watch) -> None:
    watch.note_end(0, 1)
    watch.note_end(1, 1)
    check_past_the_timeout(watch)
