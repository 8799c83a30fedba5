from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from mambapool.client.replay.scheduler import Scheduler

if TYPE_CHECKING:
    from tests.client.replay.conftest import LocalPool, MakePool, MakeRequests

STEP_MS = 30.0


def run(*schedulers: Scheduler, most: int = 100_000) -> None:
    """Step them in turn until all are done."""
    for _ in range(most):
        running = [scheduler for scheduler in schedulers if not scheduler.done]
        if not running:
            return
        for scheduler in running:
            scheduler.step()
    raise AssertionError(f"not done within {most} steps")


def test_a_request_runs_its_steps_and_gives_its_slots_back(
    make_pool: MakePool, make_requests: MakeRequests
) -> None:
    pool = make_pool(9)
    scheduler = Scheduler(pool.connect(), make_requests([(0, 3)]), track=2, step_ms=STEP_MS)
    assert [scheduler.step() for _ in range(3)] == [True, True, True]
    assert scheduler.done
    result = scheduler.finish()
    assert (result.finished, result.steps, result.waits, result.mismatches) == (1, 3, 0, 0)
    assert result.held.changes == [(0.0, 3), (90.0, 0)]
    # Two for the window, two for the track slots, one for the free.
    assert result.messages == 5
    assert len(result.alloc_us) == 3
    assert len(pool.free) == 9


def test_it_looks_how_much_is_in_use_when_it_has_taken_some(
    make_pool: MakePool, make_requests: MakeRequests
) -> None:
    """Whoever has them: by the schedulers' own clocks, which drift apart where they wait, it could be more than all."""
    pool = make_pool(8)
    requests = make_requests([(0, 20)] * 4)
    schedulers = [
        Scheduler(pool.connect(), requests, track=2, step_ms=STEP_MS, in_use=lambda: pool.slots - len(pool.free))
        for _ in range(2)
    ]
    assert pool.connect().alloc(1) is not None
    run(*schedulers)
    results = [scheduler.finish() for scheduler in schedulers]
    assert sum(result.waits for result in results) > 0
    assert max(result.most_in_use for result in results) == 7


def test_steps_without_arrivals_and_ends_send_nothing(make_pool: MakePool, make_requests: MakeRequests) -> None:
    worker = make_pool(9).connect()
    scheduler = Scheduler(worker, make_requests([(0, 50), (60, 5)]), track=2, step_ms=STEP_MS)
    sent = []
    while not scheduler.done:
        before = worker.messages
        scheduler.step()
        sent.append(worker.messages - before)
    assert sent == [4, 0, 4, 0, 0, 0, 1, *[0] * 42, 1]


def test_arrivals_join_at_the_first_step_that_begins_after_them(
    make_pool: MakePool, make_requests: MakeRequests
) -> None:
    requests = make_requests([(0, 4), (30, 1), (30.5, 1)])
    scheduler = Scheduler(make_pool(9).connect(), requests, track=0, step_ms=STEP_MS)
    run(scheduler)
    assert scheduler.finish().held.changes == [(0.0, 1), (30.0, 2), (90.0, 1), (120.0, 0)]


def test_the_clock_jumps_over_idle_time_to_the_next_arrival(
    make_pool: MakePool, make_requests: MakeRequests
) -> None:
    requests = make_requests([(100, 1), (5000, 2), (9_000_000, 1)])
    scheduler = Scheduler(make_pool(9).connect(), requests, track=0, step_ms=STEP_MS)
    begins = []
    while not scheduler.done:
        begins.append(scheduler.clock_ms)
        assert scheduler.step()
    assert begins == [100, 5000, 5030, 9_000_000]
    assert scheduler.clock_ms == 9_000_030


def test_all_requests_of_a_step_share_one_window(make_pool: MakePool, make_requests: MakeRequests) -> None:
    worker = make_pool(30).connect()
    scheduler = Scheduler(worker, make_requests([(0, 1)] * 5), track=2, step_ms=STEP_MS)
    scheduler.step()
    assert worker.calls[0] == "begin(5)"
    assert worker.calls[-1] == "free(15)"
    assert worker.messages - 1 == 2 + 10 + 1


def test_the_window_is_no_larger_than_the_pool_can_serve(make_pool: MakePool, make_requests: MakeRequests) -> None:
    worker = make_pool(8).connect()
    scheduler = Scheduler(worker, make_requests([(0, 2)] * 5), track=2, step_ms=STEP_MS)
    scheduler.step()
    assert worker.calls[0] == "begin(2)"
    run(scheduler)
    result = scheduler.finish()
    # Two at a time, two steps each: the other three waited.
    assert (result.finished, result.steps, result.waits) == (5, 6, 3)


def test_a_waiting_request_asks_for_nothing_until_enough_is_free(
    make_pool: MakePool, make_requests: MakeRequests
) -> None:
    pool = make_pool(4)
    rival = pool.connect()
    taken = rival.alloc(2)
    assert taken is not None
    worker = pool.connect()
    scheduler = Scheduler(worker, make_requests([(0, 2)]), track=2, step_ms=STEP_MS)
    begins = []
    for _ in range(100):
        begins.append(scheduler.clock_ms)
        assert not scheduler.step()
    assert worker.calls == []
    assert begins == [STEP_MS * n for n in range(100)]
    rival.free(taken)
    assert scheduler.step()
    assert scheduler.step()
    result = scheduler.finish()
    assert (result.finished, result.waits, result.steps) == (1, 1, 2)
    assert result.held.changes == [(3000.0, 3), (3060.0, 0)]


def test_a_request_waits_until_those_before_it_are_served(
    make_pool: MakePool, make_requests: MakeRequests
) -> None:
    requests = make_requests([(0, 3), (10, 9), (20, 1)])
    scheduler = Scheduler(make_pool(4).connect(), requests, track=1, step_ms=STEP_MS)
    run(scheduler)
    result = scheduler.finish()
    # The third comes at 20, and gets the slots that the first gives back at 90.
    assert result.held.changes == [(0.0, 2), (30.0, 4), (120.0, 2), (300.0, 0)]
    assert result.waits == 1


def share_out(
    pool: LocalPool, pairs: list[tuple[float, int]], schedulers: int, make_requests: MakeRequests
) -> list[Scheduler]:
    requests = make_requests(pairs)
    return [
        Scheduler(pool.connect(), requests[number::schedulers], track=2, step_ms=STEP_MS)
        for number in range(schedulers)
    ]


def run_in_any_order(schedulers: list[Scheduler], chance: random.Random) -> None:
    while left := [scheduler for scheduler in schedulers if not scheduler.done]:
        chance.choice(left).step()


@settings(deadline=None, max_examples=50)
@given(
    chance=st.randoms(use_true_random=False),
    arrivals=st.lists(st.integers(0, 3000), min_size=1, max_size=20).map(sorted),
    slots=st.integers(3, 40),
    schedulers=st.integers(1, 4),
)
def test_schedulers_that_share_a_pool_finish_everything_without_a_mismatch(
    make_pool: MakePool,
    make_requests: MakeRequests,
    chance: random.Random,
    arrivals: list[int],
    slots: int,
    schedulers: int,
) -> None:
    pool = make_pool(slots)
    pairs = [(float(arrival), chance.choice([1, 2, 10, 64, 150])) for arrival in arrivals]
    running = share_out(pool, pairs, schedulers, make_requests)
    run_in_any_order(running, chance)
    results = [scheduler.finish() for scheduler in running]
    assert sum(result.finished for result in results) == len(arrivals)
    assert [result.findings for result in results] == [[]] * schedulers
    assert sorted(pool.free) == list(range(1, slots + 1))
    assert max(result.held.peak for result in results) <= slots


@settings(deadline=None, max_examples=40)
@given(chance=st.randoms(use_true_random=False), grant=st.integers(1, 40))
def test_a_slot_that_is_granted_twice_is_reported(
    make_pool: MakePool, make_requests: MakeRequests, chance: random.Random, grant: int
) -> None:
    pool = make_pool(60, double_grant=grant)
    running = share_out(pool, [(0.0, chance.choice([2, 5, 70])) for _ in range(16)], 4, make_requests)
    run_in_any_order(running, chance)
    found = sum(scheduler.finish().mismatches for scheduler in running)
    assert (found > 0) == pool.doubled
