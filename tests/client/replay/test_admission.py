from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mambapool.client.replay.admission import admit
from mambapool.client.replay.findings import Findings
from mambapool.client.replay.slot_calls import SlotCalls

if TYPE_CHECKING:
    from tests.client.replay.conftest import MakePool, MakeRequests


def test_states_come_from_one_window_and_tracks_singly_after_it(
    make_pool: MakePool, make_requests: MakeRequests
) -> None:
    worker = make_pool(9).connect()
    holdings = admit(SlotCalls(worker, Findings()), make_requests([(0, 1), (0, 1)]), track=2)
    assert [[int(slot) for slot in holding.slots] for holding in holdings] == [[1, 3, 4], [2, 5, 6]]
    assert worker.calls == ["begin(2)", "alloc(1)", "alloc(1)", "end", *["alloc(1)"] * 4]


@pytest.mark.parametrize(
    ("slots", "served"),
    [
        pytest.param(9, 3, id="enough for all"),
        pytest.param(7, 2, id="the last gets no track slot"),
        pytest.param(5, 1, id="the second gets one of two"),
        pytest.param(4, 0, id="the first gets one of two"),
        pytest.param(2, 0, id="no window of three to be had"),
    ],
)
def test_a_request_gets_all_its_slots_or_holds_none_and_nobody_overtakes_it(
    make_pool: MakePool, make_requests: MakeRequests, slots: int, served: int
) -> None:
    pool = make_pool(slots)
    holdings = admit(SlotCalls(pool.connect(), Findings()), make_requests([(0, 1)] * 3), track=2)
    assert [holding.request.index for holding in holdings] == list(range(served))
    assert all(len(holding.slots) == 3 for holding in holdings)
    assert len(pool.free) == slots - 3 * served
    assert sorted(pool.holder) == sorted(int(slot) for holding in holdings for slot in holding.slots)


def test_what_goes_back_goes_in_one_call(make_pool: MakePool, make_requests: MakeRequests) -> None:
    worker = make_pool(5).connect()
    admit(SlotCalls(worker, Findings()), make_requests([(0, 1)] * 3), track=2)
    assert [call for call in worker.calls if call.startswith("free")] == ["free(2)"]


def test_without_track_slots_the_window_is_all(make_pool: MakePool, make_requests: MakeRequests) -> None:
    worker = make_pool(4).connect()
    holdings = admit(SlotCalls(worker, Findings()), make_requests([(0, 1)] * 4), track=0)
    assert [int(holding.slot) for holding in holdings] == [1, 2, 3, 4]
    assert worker.calls == ["begin(4)", *["alloc(1)"] * 4, "end"]
