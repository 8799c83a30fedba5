"""ALLOC, BEGIN and DETACH: what they grant, what they carry, and what a repeat is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dispatching import EPOCH, Client, everything, ids, slots_of

from mambapool.pool import protocol
from mambapool.pool.protocol import FREE, GAP, MALFORMED, NONE, NOT_OPEN, OK
from mambapool.service.pools import Pool
from mambapool.service.sessions import MAX_OPEN


def free_list(pool: Pool) -> list[int]:
    slots: list[int] = pool.table.free_list().tolist()
    return slots


def test_one_slot_travels_as_a_number_and_several_as_a_bin(client: Client) -> None:
    assert client.alloc(1) == [2, EPOCH, OK, 1]
    assert client.alloc(3) == [3, EPOCH, OK, ids(2, 3, 4)]
    assert client.begin(1) == [4, EPOCH, OK, 5]


def test_more_than_is_free_is_answered_none_and_grants_nothing(client: Client, pool: Pool) -> None:
    client.alloc(10)
    for reply in (client.alloc(7), client.begin(7), client.alloc(2**31 - 1)):
        assert reply[1:] == [EPOCH, NONE]
    assert (client.session.held, client.session.window, pool.ledger.free_count) == (10, 0, 6)
    assert slots_of(client.alloc(6)) == list(range(11, 17))
    assert client.alloc(1)[2] == NONE


@pytest.mark.parametrize("count", [0, -1, 2**31, 2**64 - 1, True, 1.0, float("nan"), "1", None, b"\1", [1]])
def test_a_count_that_is_none_is_malformed(client: Client, count: Any) -> None:
    before = everything(client.connection.dispatcher)
    for reply in (client.alloc(count), client.begin(count)):
        assert reply[2] == MALFORMED
        assert reply[3].startswith("count must be a whole number from 1 to 2147483647, not ")
    assert everything(client.connection.dispatcher) == before


@pytest.mark.parametrize("partial", [0, 1, None, "false", b""])
def test_partial_is_true_or_false(client: Client, partial: Any) -> None:
    before = everything(client.connection.dispatcher)
    reply = client.begin(2, partial=partial)
    assert reply[2] == MALFORMED
    assert "partial" in reply[3]
    assert everything(client.connection.dispatcher) == before


def test_an_open_request_is_answered_with_the_same_bytes_however_often_it_comes(
    client: Client, pool: Pool
) -> None:
    bodies = [
        client.body(protocol.ALLOC, 1, None, False, id=2),
        client.body(protocol.ALLOC, 3, None, False, id=3),
        client.body(protocol.BEGIN, 2, None, False, id=4),
        client.body(protocol.ALLOC, 100, None, False, id=5),
        client.body(protocol.ALLOC, 1, 9, False, id=6, posted=1),
    ]
    replies = [client.connection.send_body(body) for body in bodies]
    before = everything(client.connection.dispatcher)
    for _ in range(3):
        assert [client.connection.send_body(body) for body in bodies] == replies
    assert everything(client.connection.dispatcher) == before
    assert pool.ledger.free_count == 10


def test_a_none_stays_none_when_the_request_is_repeated(client: Client) -> None:
    client.alloc(16)
    assert client.alloc(1, id=3)[2] == NONE
    client.post(protocol.CLEAR)
    assert client.alloc(1, id=3)[2] == NONE
    assert client.alloc(1, id=4)[2:] == [OK, 1]


def test_a_repeat_may_come_over_another_connection(client: Client) -> None:
    body = client.body(protocol.ALLOC, 3, None, False, id=9)
    first = client.connection.send_body(body)
    client.connection.identity = b"zmq-new"
    client.connection.hello(client.lease)
    assert client.connection.send_body(body) == first


def test_requests_below_the_oldest_open_one_are_closed(client: Client) -> None:
    for request_id in (2, 3, 4):
        client.alloc(1, id=request_id)
    assert client.alloc(1, id=5, oldest_open=4)[2:] == [OK, 4]
    assert list(client.session.answers) == [4, 5]
    for request_id in (2, 3):
        reply = client.alloc(1, id=request_id)
        assert reply[:3] == [request_id, EPOCH, NOT_OPEN]
        assert f"request {request_id} is not open" in reply[3]
    assert client.alloc(1, id=4)[2:] == [OK, 3]
    assert client.session.held == 4


def test_the_oldest_open_request_never_goes_back(client: Client) -> None:
    client.alloc(1, id=9, oldest_open=9)
    client.alloc(1, id=10, oldest_open=3)
    assert client.alloc(1, id=8)[2] == NOT_OPEN
    assert client.alloc(1, id=9)[2:] == [OK, 1]


def test_a_request_that_its_own_header_closes_is_not_open(client: Client) -> None:
    assert client.alloc(1, id=5, oldest_open=6)[2] == NOT_OPEN
    assert client.session.held == 0


def test_request_ids_begin_at_one(client: Client) -> None:
    assert client.alloc(1, id=0)[2] == NOT_OPEN


def test_open_requests_are_limited(client: Client, pool: Pool) -> None:
    for _ in range(MAX_OPEN):
        assert client.alloc(100)[2] == NONE
    before = everything(client.connection.dispatcher)
    reply = client.alloc(1)
    assert reply[2] == MALFORMED
    assert "1024 open requests" in reply[3]
    assert everything(client.connection.dispatcher) == before
    # The same request is answered once there is room.
    assert client.alloc(1, id=reply[0], oldest_open=3)[2:] == [OK, 1]
    assert pool.ledger.free_count == 15


def test_the_open_requests_of_others_do_not_count(client: Client, join: Callable[[str], Client]) -> None:
    for _ in range(MAX_OPEN):
        client.alloc(100)
    assert join("other").alloc(1)[2] == OK


# Frees that a request carries.


def test_carried_frees_come_before_the_grant(client: Client, pool: Pool) -> None:
    client.alloc(16)
    assert slots_of(client.alloc(2, ids(9, 4))) == [9, 4]
    assert client.session.applied == 1
    assert client.alloc(1, 7)[2:] == [OK, 7]
    assert pool.ledger.generation_of(7) == 2
    assert slots_of(client.begin(2, ids(5, 6))) == [5, 6]


def test_carried_frees_stay_freed_when_the_list_cannot_serve_the_rest(client: Client, pool: Pool) -> None:
    client.alloc(16)
    assert client.alloc(3, ids(9, 4))[2] == NONE
    assert (free_list(pool), client.session.applied) == ([9, 4], 1)


def test_a_carried_free_is_applied_once_though_the_request_is_repeated(client: Client, pool: Pool) -> None:
    client.alloc(4)
    body = client.body(protocol.ALLOC, 1, ids(1, 2), False, id=9, posted=1)
    first = client.connection.send_body(body)
    assert client.connection.send_body(body) == first
    assert (client.session.applied, client.session.held) == (1, 3)
    assert free_list(pool)[-2:] == [1, 2]


def test_frees_that_came_as_a_posted_message_before_are_not_applied_again(client: Client, pool: Pool) -> None:
    client.alloc(4)
    assert client.post(FREE, ids(1, 2), posted=1) is None
    assert client.alloc(1, ids(1, 2), posted=1)[2:] == [OK, 5]
    assert free_list(pool)[-2:] == [1, 2]


def test_a_carried_free_that_is_refused_refuses_the_request_and_uses_up_its_number(
    client: Client, pool: Pool
) -> None:
    client.alloc(2)
    table = free_list(pool)
    for op in (client.alloc, client.begin):
        reply = op(1, ids(1, 5))
        assert reply[2] == protocol.DOUBLE_FREE
        assert slots_of(reply) == [5]
        assert reply[4] == "slots 5 are already free"
    assert (free_list(pool), client.session.held, client.session.applied) == (table, 2, 2)
    assert client.alloc(1, id=client.request_id) == reply


@pytest.mark.parametrize("frees", [True, 1.0, "1", [1], {"a": 1}, b"\1\0\0", 2**31, -(2**31) - 1])
def test_frees_that_are_no_ids_are_refused_and_change_nothing_else(client: Client, frees: Any) -> None:
    client.alloc(2)
    session = client.session
    for op in (client.alloc, client.begin):
        reply = op(1, frees, posted=session.applied + 1)
        assert reply[2] in (MALFORMED, protocol.SLOT_OUT_OF_RANGE)
        # What cannot be read is not message 1; an id that no slot has is, and is refused.
        assert session.applied == 0 or reply[2] == protocol.SLOT_OUT_OF_RANGE
        assert session.held == 2


def test_one_freed_slot_may_travel_as_a_bin_too(client: Client, pool: Pool) -> None:
    client.alloc(8)
    client.alloc(1, ids(1, 2, 3, 4))
    assert client.alloc(1, ids(5))[2] == OK
    assert free_list(pool)[-2:] == [4, 5]


def test_an_empty_bin_frees_nothing(client: Client, pool: Pool) -> None:
    client.alloc(2)
    assert client.alloc(1, b"")[2:] == [OK, 3]
    assert (client.session.applied, client.session.held) == (1, 3)


def test_a_request_that_carries_frees_has_a_number_for_them(client: Client) -> None:
    client.alloc(2)
    before = everything(client.connection.dispatcher)
    for reply in (client.alloc(1, 1, posted=0), client.begin(1, 1, posted=0)):
        assert reply[2] == MALFORMED
    assert everything(client.connection.dispatcher) == before


def test_frees_that_are_no_ids_are_malformed_in_a_repeat_too(client: Client) -> None:
    client.alloc(2)
    client.post(FREE, 1)
    before = everything(client.connection.dispatcher)
    assert client.request(protocol.ALLOC, 1, "1", False, posted=1)[2] == MALFORMED
    assert everything(client.connection.dispatcher) == before


# Posted messages that a request has to wait for.


def test_a_request_that_is_ahead_of_the_posted_messages_is_answered_gap(client: Client) -> None:
    client.alloc(4)
    client.post(FREE, 1)
    before = everything(client.connection.dispatcher)
    assert client.alloc(1, id=9, posted=2) == [9, EPOCH, GAP, 1]
    assert client.begin(1, id=9, posted=5) == [9, EPOCH, GAP, 1]
    assert client.alloc(1, 3, id=9, posted=3) == [9, EPOCH, GAP, 1]
    assert everything(client.connection.dispatcher) == before
    client.post(FREE, 2, posted=2)
    assert client.alloc(1, 3, id=9, posted=3)[2:] == [OK, 5]


def test_a_request_behind_the_posted_messages_is_answered(client: Client) -> None:
    client.alloc(4)
    client.post(FREE, 1)
    client.post(FREE, 2)
    assert client.alloc(1, posted=1)[2] == OK


# Windows.


def test_begin_opens_a_window_and_another_begin_ends_it(client: Client, pool: Pool) -> None:
    assert slots_of(client.begin(4, id=7)) == [1, 2, 3, 4]
    assert (client.session.window, pool.windows()) == (7, {1: 4})
    # The rest of the first window goes back with the second begin, and is behind everything else.
    assert slots_of(client.begin(3, ids(3, 4), id=8)) == [5, 6, 7]
    assert (client.session.window, pool.windows()) == (8, {1: 3})
    assert client.session.held == 5
    assert free_list(pool)[-2:] == [3, 4]


def test_a_window_is_all_or_nothing(client: Client, pool: Pool) -> None:
    client.alloc(10)
    assert client.begin(7)[2] == NONE
    assert (client.session.window, pool.windows(), pool.ledger.free_count) == (0, {}, 6)


def test_a_partial_window_takes_what_there_is(client: Client, pool: Pool) -> None:
    client.alloc(10)
    assert slots_of(client.begin(9, partial=True)) == list(range(11, 17))
    assert pool.windows() == {1: 6}
    assert client.begin(9, partial=True)[2] == NONE
    assert (client.session.window, pool.windows()) == (0, {})
    assert slots_of(client.begin(9, 16, partial=True)) == [16]


def test_a_begin_that_gets_nothing_ends_the_window_before_it(client: Client, pool: Pool) -> None:
    client.begin(10)
    assert client.begin(7)[2] == NONE
    assert (client.session.window, pool.windows(), client.session.held) == (0, {}, 10)


def test_a_begin_whose_frees_are_refused_leaves_the_window_open(client: Client, pool: Pool) -> None:
    client.begin(4, id=7)
    assert client.begin(2, ids(3, 9))[2] == protocol.DOUBLE_FREE
    assert (client.session.window, pool.windows()) == (7, {1: 4})


def test_an_alloc_inside_a_window_is_not_of_the_window(client: Client, pool: Pool) -> None:
    client.begin(4, id=7)
    client.alloc(3)
    assert (client.session.window, pool.windows(), client.session.held) == (7, {1: 4}, 7)


# DETACH.


def test_detach_frees_everything_and_is_answered(
    client: Client, pool: Pool, join: Callable[[str], Client]
) -> None:
    other = join("other")
    client.alloc(3)
    other.alloc(2)
    client.begin(4)
    assert client.request(protocol.DETACH) == [4, EPOCH, OK]
    assert list(client.connection.dispatcher.registry.sessions) == [other.number]
    assert free_list(pool) == [*range(10, 17), 1, 2, 3, 6, 7, 8, 9]


def test_detach_asks_for_no_posted_message(client: Client) -> None:
    client.alloc(3)
    assert client.request(protocol.DETACH, posted=9)[2] == OK


def test_what_a_repeat_is_answered_does_not_depend_on_later_changes(client: Client) -> None:
    """The reply is kept as bytes, not made anew from an array that somebody else may write to."""
    first = client.alloc(4, id=2)
    granted = client.session.answers[2].granted
    assert isinstance(granted, bytes)
    assert granted == ids(*slots_of(first))
    assert client.alloc(4, id=2) == first
