from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mambapool.client.replay.options import ReplayOptions
from mambapool.pool.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"schedulers": 0}, "--schedulers 0: expected a whole number from 1 to 256"),
        ({"schedulers": 257}, "--schedulers 257"),
        ({"limit": 2**32}, "--limit 4294967296: expected a whole number from 1 to 4294967295"),
        ({"more_traces": (Path("b"),)}, "--schedulers 4: of 2 traces each has one scheduler"),
        ({"schedulers": True}, "--schedulers True"),
        ({"track": -1}, "--track -1"),
        ({"limit": 0}, "--limit 0"),
        ({"tp_size": 0}, "--tp-size 0: expected a whole number from 1 to 256"),
        ({"guarantee": -1}, "--guarantee -1: expected a whole number from 0 to"),
        ({"step_ms": 0.0}, "--step-ms 0.0: expected a number above 0"),
        ({"step_ms": float("nan")}, "--step-ms nan"),
        ({"speed": -2.0}, "--speed -2.0"),
        ({"timeout": float("inf")}, "--timeout inf"),
        ({"route": "best"}, "--route 'best' is not one of rr, prefix"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_its_flag(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ReplayOptions(Path("trace.jsonl"), **changes)
    assert told in str(raised.value)


def test_a_request_takes_one_slot_for_its_state_and_its_track_slots() -> None:
    assert ReplayOptions(Path("trace.jsonl"), track=2).slots_per_request == 3
    assert ReplayOptions(Path("trace.jsonl"), track=0).slots_per_request == 1
