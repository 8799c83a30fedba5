from __future__ import annotations

import time

from mambapool.client.replay.pace import Pace


def test_the_clock_is_never_ahead_of_speed_times_real_time() -> None:
    origin_s = time.monotonic()
    pace = Pace(10.0, origin_s)
    for clock_ms in range(0, 1000, 100):
        pace.hold(clock_ms, lambda: None)
        assert (time.monotonic() - origin_s) * 10.0 >= clock_ms / 1000


def test_a_clock_that_is_behind_is_not_held() -> None:
    calls: list[None] = []
    Pace(1.0, time.monotonic() - 60).hold(59_000, lambda: calls.append(None))
    Pace(None, time.monotonic()).hold(10**9, lambda: calls.append(None))
    assert calls == []


def test_a_long_wait_is_interrupted_now_and_then() -> None:
    calls: list[float] = []
    Pace(1.0, time.monotonic()).hold(200, lambda: calls.append(time.monotonic()))
    assert len(calls) >= 3
