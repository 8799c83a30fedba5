from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mambapool.client.replay.recurrence import MULTIPLIER, drive, weights

KEYS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("bits", [16, 32])
@settings(deadline=None)
@given(start=st.integers(), foreign=st.integers(), steps=st.integers(1, 5000))
def test_two_histories_that_differ_once_differ_for_ever(bits: int, start: int, foreign: int, steps: int) -> None:
    difference = (start - foreign) % 2**bits
    after = difference * pow(MULTIPLIER[bits], steps, 2**bits) % 2**bits
    assert (after != 0) == (difference != 0)


@settings(deadline=None)
@given(step=KEYS, requests=st.sets(KEYS, min_size=2, max_size=200))
def test_no_two_requests_have_the_same_drive_at_the_same_step(step: int, requests: set[int]) -> None:
    keys = np.array(sorted(requests), np.uint32)
    drives = drive(keys, np.full_like(keys, step))
    assert len(set(drives.tolist())) == len(requests)


def test_the_drive_depends_on_the_step() -> None:
    steps = np.arange(100_000, dtype=np.uint32)
    assert len(set(drive(np.full_like(steps, 7), steps).tolist())) > 99_000


def test_the_drive_leaves_its_arguments_alone() -> None:
    requests, steps = np.array([3, 4], np.uint32), np.array([5, 6], np.uint32)
    drive(requests, steps)
    assert (requests.tolist(), steps.tolist()) == ([3, 4], [5, 6])


@pytest.mark.parametrize(("bits", "distinct"), [(16, 2**15), (32, 100_000)])
def test_weights_are_odd_and_all_different(bits: int, distinct: int) -> None:
    found = weights(distinct, bits)
    assert found.itemsize * 8 == bits
    assert (found & 1).all()
    assert len(set(found.tolist())) == distinct
