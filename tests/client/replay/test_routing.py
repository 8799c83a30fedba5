from __future__ import annotations

from pathlib import Path

import pytest

from mambapool.client.replay import trace
from mambapool.client.replay.request import Request
from mambapool.client.replay.routing import ROUTES, route, share
from mambapool.pool.errors import ConfigError

SHIPPED = Path(__file__).parents[3] / "bench/traces/mooncake_conversation_trace.jsonl.gz"


def with_blocks(index: int, *hash_ids: int) -> Request:
    return Request(index, 0.0, 1, 1, hash_ids)


def test_rr_deals_the_requests_out_in_turn() -> None:
    requests = [with_blocks(index, 0, 1) for index in range(7)]
    assert [route(request, 3, "rr") for request in requests] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("by", ROUTES)
def test_every_request_has_one_scheduler(by: str) -> None:
    requests = trace.load(SHIPPED, limit=500)
    shares = [share(requests, scheduler, 4, by) for scheduler in range(4)]
    assert sorted((r for part in shares for r in part), key=lambda r: r.index) == requests
    assert all(part == sorted(part, key=lambda r: r.index) for part in shares)


def test_prefix_keeps_equal_first_blocks_together_and_spreads_the_others() -> None:
    same = {route(with_blocks(index, 0, 7, index), 8, "prefix") for index in range(50)}
    others = {route(with_blocks(0, 0, second), 8, "prefix") for second in range(200)}
    assert len(same) == 1
    assert others == set(range(8))


def test_prefix_spreads_the_shipped_trace_over_all_schedulers() -> None:
    requests = trace.load(SHIPPED)
    sizes = [len(share(requests, scheduler, 4, "prefix")) for scheduler in range(4)]
    assert min(sizes) > 0.8 * len(requests) / 4


def test_a_request_without_blocks_is_dealt_out_in_turn() -> None:
    assert [route(with_blocks(index), 3, "prefix") for index in range(4)] == [0, 1, 2, 0]


def test_the_largest_id_that_a_trace_may_hold_can_be_routed() -> None:
    assert 0 <= route(with_blocks(0, 2**63 - 1, 0), 4, "prefix") < 4


def test_an_unknown_route_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'best' is not one of rr, prefix"):
        route(with_blocks(0), 4, "best")
