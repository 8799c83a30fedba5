"""What one batch, or several over one pool, find in their slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mambapool.client.replay.admission import Holding
from mambapool.client.replay.batch import TRACK_EVERY, Batch
from mambapool.client.replay.findings import Findings
from mambapool.client.replay.request import Request

if TYPE_CHECKING:
    from tests.client.replay.conftest import LocalWorker, MakePool

ODD = {"conv": (torch.float16, (2, 3, 3))}


def holding(index: int, steps: int, slot: int, *tracks: int) -> Holding:
    request = Request(index, 0.0, 1, steps)
    return Holding(request, torch.tensor([slot]), [torch.tensor([track]) for track in tracks])


def run(batch: Batch, steps: int) -> list[int]:
    """The indices of the requests that finish within so many steps, in the order in which they do."""
    finished: list[int] = []
    for _ in range(steps):
        if len(batch):
            finished += [ended.request.index for ended in batch.step()]
    return finished


class Rig:
    """Some batches over the states of one pool, and what they find together."""

    def __init__(self, worker: LocalWorker, batches: int = 1) -> None:
        self.states = worker.states
        self.findings = [Findings() for _ in range(batches)]
        self.batches = [Batch(worker, findings) for findings in self.findings]

    @property
    def found(self) -> int:
        return sum(map(len, self.findings))

    @property
    def lines(self) -> list[str]:
        return [line for findings in self.findings for line in findings.lines]


@pytest.fixture(params=["words of 32 bits", "words of 16 bits"])
def rig(request: pytest.FixtureRequest, make_pool: MakePool) -> Rig:
    pool = make_pool(16) if request.param == "words of 32 bits" else make_pool(16, ODD)
    return Rig(pool.connect())


def test_requests_finish_after_their_steps_and_nothing_is_found(rig: Rig) -> None:
    (batch,) = rig.batches
    batch.start([holding(0, 3, 5, 6, 7), holding(1, 200, 1, 2, 3)])
    assert run(batch, 2) == []
    batch.start([holding(2, 1, 9, 10, 11), holding(3, TRACK_EVERY, 12)])
    assert run(batch, 1) == [0, 2]
    assert run(batch, 1000) == [3, 1]
    assert rig.found == 0


def test_a_slot_is_used_again_without_a_trace_of_its_last_request(rig: Rig) -> None:
    (batch,) = rig.batches
    for index in range(5):
        batch.start([holding(index, 70, 4, 8, 2)])
        assert run(batch, 70) == [index]
    assert rig.found == 0


def test_every_step_changes_the_state_and_no_other_row(rig: Rig) -> None:
    (batch,) = rig.batches
    batch.start([holding(0, 10, 5)])
    before = {name: state.clone() for name, state in rig.states.items()}
    run(batch, 1)
    for name, state in rig.states.items():
        changed = bits(state) != bits(before[name])
        assert changed[:, 5].float().mean() > 0.9
        changed[:, 5] = False
        assert not changed.any()


def test_track_slots_get_the_state_in_turn(rig: Rig) -> None:
    (batch,) = rig.batches
    batch.start([holding(0, 4 * TRACK_EVERY, 5, 6, 7)])
    for track in (6, 7, 6):
        run(batch, TRACK_EVERY)
        for state in rig.states.values():
            assert torch.equal(bits(state[:, track]), bits(state[:, 5]))
            assert not torch.equal(bits(state[:, 6]), bits(state[:, 7]))


def test_a_mismatch_names_request_slot_tensor_and_first_element(rig: Rig) -> None:
    (batch,) = rig.batches
    batch.start([holding(0, 4, 3), holding(17, 4, 5)])
    run(batch, 2)
    element = bits(rig.states["conv"])[1, 5, 2]
    element[1] ^= 0x0101
    assert run(batch, 2) == [0, 17]
    (line,) = rig.lines
    assert line.startswith("request 17, slot 5 (its state) after step 4: conv[1, 5, 2, 1] holds 0x")
    assert f"holds {int(element[1]) & 0xFFFF:#x} instead of 0x" in line


def test_a_request_is_counted_once_however_much_of_it_is_spoiled(rig: Rig) -> None:
    (batch,) = rig.batches
    batch.start([holding(0, 70, 1, 2, 3), holding(1, 70, 4, 5, 6)])
    for state in rig.states.values():
        bits(state)[:] ^= 1
    run(batch, 70)
    assert rig.found == 2
    assert [line.split(",")[0] for line in rig.lines] == ["request 0", "request 1"]


@pytest.mark.parametrize("wrong", ["nothing is copied", "another state is copied"])
def test_a_copy_that_goes_wrong_is_found(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    worker = make_pool(16).connect()
    copy = worker.copy

    def wrong_copy(src: torch.Tensor, dst: torch.Tensor) -> None:
        if wrong == "another state is copied":
            copy(src + 1, dst)

    monkeypatch.setattr(worker, "copy", wrong_copy)
    rig = Rig(worker)
    rig.batches[0].start([holding(0, TRACK_EVERY, 1, 5)])
    run(rig.batches[0], TRACK_EVERY)
    (line,) = rig.lines
    assert line.startswith("request 0, slot 5 (track 0) after step 64: conv[0, 5, 0, 0] holds ")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


@settings(deadline=None, max_examples=50)
@given(data=st.data(), steps=st.integers(1, 4 * TRACK_EVERY), odd=st.booleans())
def test_a_foreign_write_of_one_element_is_found_whenever_it_happens(
    make_pool: MakePool, data: st.DataObject, steps: int, odd: bool
) -> None:
    rig = Rig((make_pool(16, ODD) if odd else make_pool(16)).connect())
    (batch,) = rig.batches
    batch.start([holding(0, steps, 1, 2, 3), holding(1, steps, 5, 6, 7)])
    run(batch, data.draw(st.integers(0, steps - 1), label="steps before the write"))
    slot = data.draw(st.sampled_from([5, 6, 7]), label="slot")
    name = data.draw(st.sampled_from(sorted(rig.states)), label="tensor")
    row = bits(rig.states[name])[:, slot]
    element = tuple(data.draw(st.integers(0, size - 1)) for size in row.shape)
    width = 8 * row.element_size()
    row[element] ^= data.draw(st.integers(-(2 ** (width - 1)), 2 ** (width - 1) - 1).filter(bool))
    assert run(batch, steps) == [0, 1]
    (line,) = rig.lines
    assert line.startswith(f"request 1, slot {slot} (")
    layer, *rest = element
    assert f": {name}[{', '.join(map(str, (layer, slot, *rest)))}] holds " in line


@settings(deadline=None, max_examples=50)
@given(data=st.data(), lengths=st.tuples(st.integers(1, 200), st.integers(1, 200)))
def test_two_requests_that_share_a_slot_are_found_however_short_the_overlap(
    make_pool: MakePool, data: st.DataObject, lengths: tuple[int, int]
) -> None:
    """Both in one batch, or each in the batch of a scheduler of its own; shared as state or as track slot."""
    alone = data.draw(st.booleans(), label="a scheduler each")
    rig = Rig(make_pool(16).connect(), 2 if alone else 1)
    shared = data.draw(st.sampled_from(range(3)), label="the first's slot") + 1
    others = [4, 5, 6]
    others[data.draw(st.integers(0, 2), label="the second's place for it")] = shared
    first, second = rig.batches[0], rig.batches[-1]
    first.start([holding(0, lengths[0], 1, 2, 3)])
    # The second begins before the last step of the first: however late, and wherever either ends then.
    run(first, data.draw(st.integers(0, lengths[0] - 1), label="the first's steps alone"))
    second.start([holding(1, lengths[1], *others)])
    chance = data.draw(st.randoms(use_true_random=False), label="who steps when")
    while running := [batch for batch in rig.batches if len(batch)]:
        run(chance.choice(running), 1)
    assert rig.found >= 1
    assert any(f"slot {shared} " in line for line in rig.lines)


def test_two_requests_in_slots_of_their_own_are_not_found(make_pool: MakePool) -> None:
    rig = Rig(make_pool(16).connect(), 2)
    rig.batches[0].start([holding(0, 150, 1, 2, 3)])
    rig.batches[1].start([holding(1, 100, 4, 5, 6)])
    while any(map(len, rig.batches)):
        for batch in rig.batches:
            run(batch, 1)
    assert rig.found == 0
