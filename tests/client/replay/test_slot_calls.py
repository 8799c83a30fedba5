from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from mambapool.client.replay.findings import MOST_LINES, Findings
from mambapool.client.replay.slot_calls import SlotCalls
from mambapool.pool.errors import NotHolder

if TYPE_CHECKING:
    from tests.client.replay.conftest import LocalWorker, MakePool


def late_refusals(worker: LocalWorker, monkeypatch: pytest.MonkeyPatch, call: str, times: int) -> None:
    """The next calls raise what was wrong with a free that was posted earlier, and do nothing."""
    original = getattr(worker, call)
    left = [times]

    def refusing(*arguments: object) -> object:
        if left[0]:
            left[0] -= 1
            raise NotHolder("slots 63 are held by session 9", [63])
        return original(*arguments)

    monkeypatch.setattr(worker, call, refusing)


def test_only_calls_that_cost_a_message_are_timed(make_pool: MakePool) -> None:
    calls = SlotCalls(make_pool(8).connect(), Findings())
    calls.open_window(2)
    assert [calls.take() is not None for _ in range(2)] == [True, True]
    assert len(calls.alloc_us) == 1
    calls.close_window()
    calls.take()
    assert len(calls.alloc_us) == 2
    assert min(calls.alloc_us) > 0


@pytest.mark.parametrize("call", ["available_size", "alloc", "alloc_group_begin", "alloc_group_end", "free"])
def test_the_refusal_of_an_earlier_free_is_a_finding_and_the_call_is_made(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    pool = make_pool(8)
    worker = pool.connect()
    findings = Findings()
    calls = SlotCalls(worker, findings)
    late_refusals(worker, monkeypatch, call, 2)
    calls.open_window(1)
    slot = calls.take()
    assert slot is not None
    calls.close_window()
    calls.give_back([slot])
    assert calls.available() == 8
    assert list(pool.holder) == []
    assert len(findings) == 2
    assert findings.lines == ["NotHolder: slots 63 are held by session 9"] * 2


def test_a_refused_free_is_a_finding_and_the_rest_is_freed(make_pool: MakePool) -> None:
    pool = make_pool(8)
    worker, rival = pool.connect(), pool.connect()
    findings = Findings()
    calls = SlotCalls(worker, findings)
    slots = [slot for _ in range(3) if (slot := calls.take()) is not None]
    foreign = rival.alloc(1)
    assert foreign is not None
    calls.give_back([slots[0], foreign, slots[1], torch.tensor([8]), slots[2]])
    assert list(pool.holder) == [int(foreign)]
    assert [line.split(":")[0] for line in findings.lines] == ["DoubleFree", "NotHolder"]


def test_a_slot_that_was_granted_twice_is_freed_once(make_pool: MakePool) -> None:
    pool = make_pool(8)
    findings = Findings()
    calls = SlotCalls(pool.connect(), findings)
    slot, other = calls.take(), calls.take()
    assert slot is not None
    assert other is not None
    calls.give_back([slot, slot, other])
    assert len(pool.free) == 8
    assert findings.lines == ["DuplicateSlot: slots [1] are named twice"]


@pytest.mark.parametrize(("slots", "raising"), [(8, "free"), (2, "available_size")])
def test_the_refusal_of_the_last_free_is_found_at_the_end(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, slots: int, raising: str
) -> None:
    pool = make_pool(slots)
    worker = pool.connect()
    pool.connect().alloc(2)
    findings = Findings()
    late_refusals(worker, monkeypatch, raising, 1)
    SlotCalls(worker, findings).confirm()
    assert len(findings) == 1
    assert len(pool.free) == slots - 2


def test_giving_back_nothing_sends_nothing(make_pool: MakePool) -> None:
    worker = make_pool(8).connect()
    SlotCalls(worker, Findings()).give_back([])
    assert worker.calls == []


def test_a_call_that_is_refused_for_ever_is_raised(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_pool(8).connect()
    late_refusals(worker, monkeypatch, "alloc", 10**9)
    with pytest.raises(NotHolder):
        SlotCalls(worker, Findings()).take()


def test_findings_count_a_request_once_and_keep_the_first_lines() -> None:
    findings = Findings()
    for request in range(MOST_LINES + 5):
        findings.spoiled(request, f"first of {request}")
        findings.spoiled(request, f"second of {request}")
    assert len(findings) == MOST_LINES + 5
    assert findings.lines == [f"first of {request}" for request in range(MOST_LINES)]
