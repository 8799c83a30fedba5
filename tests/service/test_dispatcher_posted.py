"""FREE, END, CLEAR, CANCEL and CLOSE: numbered, applied once and in order, answered only when refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from dispatching import EPOCH, Client, everything, ids, slots_of

from mambapool.pool import protocol
from mambapool.pool.protocol import CANCEL, CLEAR, CLOSE, END, FREE, GAP, MALFORMED, NONE, NOT_OPEN, OK
from mambapool.service.pools import Pool
from mambapool.service.sessions import MAX_OPEN


def free_list(pool: Pool) -> list[int]:
    slots: list[int] = pool.table.free_list().tolist()
    return slots


def test_a_free_is_not_answered_and_goes_to_the_tail_in_its_order(client: Client, pool: Pool) -> None:
    client.alloc(6)
    assert client.post(FREE, 3) is None
    assert client.post(FREE, ids(6, 1, 4)) is None
    assert free_list(pool) == [*range(7, 17), 3, 6, 1, 4]
    assert (client.session.applied, client.session.held) == (2, 2)


def test_every_posted_message_is_applied_once_and_in_order_however_they_come(client: Client, pool: Pool) -> None:
    """All orders of three messages, each sent again until it is applied, as a client does after a GAP."""
    for order in itertools.permutations((0, 1, 2)):
        slots = slots_of(client.alloc(3))
        first = client.session.applied + 1
        while client.session.applied < first + 2:
            for place in order:
                number = first + place
                expected = [0, EPOCH, GAP, client.session.applied] if number > client.session.applied + 1 else None
                assert client.post(FREE, slots[place], posted=number) == expected
        assert free_list(pool)[-3:] == slots
    assert client.session.held == 0


def test_a_message_that_is_missing_is_told_and_nothing_is_applied(client: Client) -> None:
    client.alloc(3)
    client.post(FREE, 1)
    before = everything(client.connection.dispatcher)
    for op, argument in ((FREE, 2), (END, None), (CLEAR, None), (CANCEL, 2)):
        assert client.post(op, argument, posted=3) == [0, EPOCH, GAP, 1]
        assert client.post(op, argument, posted=2**63 - 1) == [0, EPOCH, GAP, 1]
    assert everything(client.connection.dispatcher) == before


def test_a_repeat_is_not_answered_and_changes_nothing(client: Client) -> None:
    client.begin(4)
    client.post(FREE, 1)
    client.post(END, ids(2, 3))
    before = everything(client.connection.dispatcher)
    for op, argument, number in (
        (FREE, 1, 1),
        (END, ids(2, 3), 2),
        (CLEAR, None, 1),
        (CANCEL, 2, 2),
    ):
        assert client.post(op, argument, posted=number) is None
    assert everything(client.connection.dispatcher) == before


def refusals() -> list[Any]:
    """Frees of a client that holds 1 to 4, while another one holds 5 and 6, of 16 slots."""
    cases = {
        "double": (ids(1, 9, 8), protocol.DOUBLE_FREE, [9, 8], "slots 9, 8 are already free"),
        "foreign": (ids(1, 6, 5), protocol.NOT_HOLDER, [6, 5], "slots 6, 5 are held by 2, not by 1"),
        "reserved": (
            ids(1, 0),
            protocol.RESERVED_SLOT,
            [0],
            "slot 0 is the reserved row: it is never handed out and never freed",
        ),
        "above": (ids(1, 17), protocol.SLOT_OUT_OF_RANGE, [17], "slots 17 are outside 1..16"),
        "below": (-1, protocol.SLOT_OUT_OF_RANGE, [-1], "slots -1 are outside 1..16"),
        "no int32": (2**31, protocol.SLOT_OUT_OF_RANGE, [], f"slots {2**31} are outside 1..16"),
        "twice": (ids(1, 2, 1), protocol.DUPLICATE_SLOT, [1], "slots 1 are named more than once"),
        "a large batch": (
            ids(*range(1, 17), 3),
            protocol.DUPLICATE_SLOT,
            [3],
            "slots 3 are named more than once",
        ),
    }
    return [pytest.param(*case, id=name) for name, case in cases.items()]


@pytest.mark.parametrize("op", [FREE, END], ids=["FREE", "END"])
@pytest.mark.parametrize(("frees", "status", "named", "text"), refusals())
def test_a_refused_free_is_told_uses_up_its_number_and_changes_nothing_else(
    client: Client,
    join: Callable[[str], Client],
    pool: Pool,
    op: int,
    frees: int | bytes,
    status: int,
    named: list[int],
    text: str,
) -> None:
    client.begin(4, id=7)
    join("other").alloc(2)
    before = (free_list(pool), pool.windows(), client.session.held)
    reply = client.post(op, frees)
    assert reply == [0, EPOCH, status, ids(*named), text]
    assert (free_list(pool), pool.windows(), client.session.held) == before
    assert client.session.applied == 1
    assert client.post(op, frees, posted=1) is None
    assert client.post(FREE, 1) is None


@pytest.mark.parametrize("op", [FREE, END], ids=["FREE", "END"])
@pytest.mark.parametrize("frees", [True, 1.0, "1", [1], {"a": 1}, b"\1\0\0"])
def test_a_free_that_names_no_ids_is_malformed_and_does_not_use_up_its_number(
    client: Client, op: int, frees: Any
) -> None:
    client.alloc(3)
    before = everything(client.connection.dispatcher)
    reply = client.post(op, frees)
    assert reply is not None
    assert reply[:3] == [0, EPOCH, MALFORMED]
    assert everything(client.connection.dispatcher) == before
    assert client.post(FREE, 1, posted=1) is None
    assert client.session.held == 2


def test_only_end_may_free_nothing(client: Client) -> None:
    assert client.post(FREE, None) == [0, EPOCH, MALFORMED, "slot ids travel as an int or a bin, not as NoneType"]
    assert client.post(END, None, posted=1) is None
    assert client.session.applied == 1


def test_end_gives_back_the_frees_in_call_order_and_then_the_unused_rest(client: Client, pool: Pool) -> None:
    client.alloc(2)
    assert slots_of(client.begin(5)) == [3, 4, 5, 6, 7]
    # 3, 4 and 5 were handed out; 4 and then 1 were freed inside; 6 and 7 were not used.
    assert client.post(END, ids(4, 1, 6, 7)) is None
    assert free_list(pool) == [*range(8, 17), 4, 1, 6, 7]
    assert (client.session.window, pool.windows(), client.session.held) == (0, {}, 3)
    assert [session.window for session in pool.table.sessions()] == [0], "a restart finds no window either"


def test_an_end_without_a_window_frees_like_a_free(client: Client, pool: Pool) -> None:
    client.alloc(2)
    assert client.post(END, 1) is None
    assert free_list(pool)[-1] == 1


def test_a_free_inside_a_window_leaves_it_open(client: Client, pool: Pool) -> None:
    client.begin(4, id=7)
    client.post(FREE, ids(1, 3))
    assert (client.session.window, pool.windows()) == (7, {1: 2})


def test_a_slot_that_comes_back_into_an_open_window_by_another_request_is_not_of_it(
    client: Client, pool: Pool
) -> None:
    client.alloc(12)
    client.begin(4, id=7)
    client.post(FREE, 14)
    assert client.alloc(1)[2:] == [OK, 14]
    assert (pool.windows(), client.session.held) == ({1: 3}, 16)


def test_clear_frees_what_this_session_holds_and_its_window(
    client: Client, join: Callable[[str], Client], pool: Pool
) -> None:
    other = join("other")
    other.alloc(2)
    client.alloc(3)
    client.begin(2)
    assert client.post(CLEAR) is None
    assert free_list(pool) == [*range(8, 17), 3, 4, 5, 6, 7]
    assert (client.session.window, client.session.held, other.session.held) == (0, 0, 2)
    other.post(CLEAR)
    assert free_list(pool) == list(range(1, 17))


@pytest.mark.parametrize("argument", [0, False, b"", "x", [None]])
def test_clear_takes_nil_only(client: Client, argument: Any) -> None:
    client.alloc(2)
    before = everything(client.connection.dispatcher)
    reply = client.post(CLEAR, argument)
    assert reply is not None
    assert reply[2] == MALFORMED
    assert everything(client.connection.dispatcher) == before


@pytest.mark.parametrize(("op", "argument"), [(FREE, 1), (END, None), (CLEAR, None), (CANCEL, 2)])
def test_posted_messages_are_numbered_from_one_on(client: Client, op: int, argument: int | None) -> None:
    client.alloc(2)
    before = everything(client.connection.dispatcher)
    reply = client.post(op, argument, posted=0)
    assert reply is not None
    assert reply[2] == MALFORMED
    assert everything(client.connection.dispatcher) == before


# CANCEL.


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_cancel_gives_back_what_the_request_was_granted(client: Client, pool: Pool, count: int) -> None:
    client.alloc(2)
    granted = slots_of(client.alloc(count, id=9))
    assert client.post(CANCEL, 9) is None
    assert free_list(pool) == [*range(3 + count, 17), *granted]
    assert client.session.held == 2
    assert client.alloc(1, id=9)[2] == NOT_OPEN


def test_cancel_of_a_begin_gives_back_its_window(client: Client, pool: Pool) -> None:
    client.begin(5, id=9)
    client.post(CANCEL, 9)
    assert (client.session.window, client.session.held, pool.windows()) == (0, 0, {})


def test_cancel_of_another_request_leaves_the_window_open(client: Client, pool: Pool) -> None:
    client.begin(5, id=8)
    client.alloc(2, id=9)
    client.post(CANCEL, 9)
    assert (client.session.window, pool.windows()) == (8, {1: 5})


def test_cancel_gives_back_only_what_is_still_held_by_that_request(
    client: Client, join: Callable[[str], Client], pool: Pool
) -> None:
    client.alloc(4, id=9)
    client.post(FREE, ids(2, 3))
    join("other").alloc(12)
    assert slots_of(client.alloc(2, id=10)) == [2, 3]
    client.post(CANCEL, 9)
    assert free_list(pool) == [1, 4]
    assert client.session.held == 2


def test_cancel_bars_a_request_that_has_not_come_yet(client: Client, pool: Pool) -> None:
    assert client.post(CANCEL, 9) is None
    reply = client.alloc(2, id=9)
    assert reply[:3] == [9, EPOCH, NOT_OPEN]
    assert "cancelled" in reply[3]
    assert pool.ledger.free_count == 16
    assert client.alloc(2, id=10)[2] == OK


def test_cancel_of_a_request_that_got_nothing_bars_it(client: Client) -> None:
    client.alloc(17, id=9)
    client.post(CANCEL, 9)
    assert client.alloc(1, id=9)[2] == NOT_OPEN


def test_cancel_of_a_request_whose_reply_has_arrived_changes_nothing(client: Client) -> None:
    client.alloc(4, id=9)
    client.alloc(1, id=10, oldest_open=10)
    client.post(CANCEL, 9)
    assert (client.session.held, client.session.barred) == (5, set())


def test_a_cancelled_request_is_forgotten_once_it_is_closed(client: Client) -> None:
    client.post(CANCEL, 9)
    assert client.session.barred == {9}
    client.alloc(1, id=12, oldest_open=12)
    assert client.session.barred == set()


def test_a_cancelled_request_that_carried_frees_keeps_them_freed(client: Client, pool: Pool) -> None:
    client.alloc(4)
    client.alloc(2, ids(1, 2), id=9)
    client.post(CANCEL, 9)
    assert free_list(pool) == [*range(7, 17), 1, 2, 5, 6]


def test_a_late_request_does_not_bring_its_frees_a_second_time(client: Client, pool: Pool) -> None:
    """A client whose ALLOC was lost sends its frees again as a FREE, and then the CANCEL."""
    client.alloc(4)
    client.post(FREE, ids(1, 2))
    client.post(CANCEL, 9)
    assert client.alloc(2, ids(1, 2), id=9, posted=1)[2] == NOT_OPEN
    assert free_list(pool) == [*range(5, 17), 1, 2]


@pytest.mark.parametrize("request_id", [None, 0, -1, 2**63, 2**64 - 1, True, 1.0, "1", b"\1"])
def test_cancel_names_a_request_id(client: Client, request_id: Any) -> None:
    before = everything(client.connection.dispatcher)
    assert client.post(CANCEL, request_id) == [0, EPOCH, MALFORMED, "CANCEL names a request id"]
    assert everything(client.connection.dispatcher) == before


def test_barred_ids_are_limited_like_open_requests(client: Client) -> None:
    for request_id in range(10, 10 + MAX_OPEN):
        assert client.post(CANCEL, request_id) is None
    before = everything(client.connection.dispatcher)
    reply = client.post(CANCEL, 5000)
    assert reply is not None
    assert reply[2] == MALFORMED
    assert "1024 open requests" in reply[3]
    assert everything(client.connection.dispatcher) == before
    # The number was not used up: the message comes again, and says what may be forgotten.
    assert client.post(CANCEL, 5000, posted=client.posted, oldest_open=4000) is None
    assert client.session.barred == {5000}


def test_a_posted_message_closes_requests_too(client: Client) -> None:
    client.alloc(1, id=2)
    client.alloc(20, id=3)
    client.post(FREE, 1, oldest_open=3)
    assert list(client.session.answers) == [3]
    assert client.alloc(1, id=2)[2] == NOT_OPEN
    assert client.alloc(1, id=3)[2] == NONE


def test_posted_messages_of_two_sessions_are_numbered_apart(client: Client, join: Callable[[str], Client]) -> None:
    other = join("other")
    client.alloc(2)
    other.alloc(2)
    assert client.post(FREE, 1) is None
    assert other.post(FREE, 3) is None
    assert client.post(FREE, 2) is None
    assert (client.session.applied, other.session.applied) == (2, 1)


def test_close_forgets_replies_while_an_older_request_stays_open(client: Client) -> None:
    assert client.accept(wait=True, id=2) is None
    for request_id in (3, 4, 5):
        client.alloc(1, id=request_id, oldest_open=2)
    assert client.post(CLOSE, [3, 5, 99], oldest_open=2) is None
    assert list(client.session.answers) == [4]
    assert client.session.accepting == 2, "which it does not name"
    assert client.session.held == 3, "what was granted stays"


def test_close_forgets_cancelled_requests_and_what_another_allocator_granted(client: Client) -> None:
    client.post(CANCEL, 7)
    client.session.recovered[8] = pool_ids = protocol.unpack_ids(ids(1, 2))
    assert client.post(CLOSE, [7]) is None
    assert (client.session.barred, client.session.recovered) == (set(), {8: pool_ids})
    assert client.post(CLOSE, [8]) is None
    assert client.session.recovered == {}


def test_with_close_a_session_makes_any_number_of_calls_while_one_waits(client: Client) -> None:
    assert client.accept(wait=True, id=2) is None
    closed: list[int] = []
    for request_id in range(3, 3 + 2 * MAX_OPEN):
        reply = client.alloc(1, id=request_id, oldest_open=2)
        assert reply[2] == OK
        client.post(FREE, reply[3], oldest_open=2)
        closed.append(request_id)
        if len(closed) == 128:
            assert client.post(CLOSE, closed, oldest_open=2) is None
            closed = []
    assert client.alloc(1, id=10**6, oldest_open=2)[2] == OK


@pytest.mark.parametrize(
    "requests", [None, 2, b"\2\0\0\0", [0], [-1], [2**63], [True], ["2"], [2, None], {"2": 2}]
)
def test_close_names_request_ids(client: Client, requests: object) -> None:
    client.alloc(1)
    before = everything(client.connection.dispatcher)
    reply = client.post(CLOSE, requests)
    assert reply is not None
    assert reply[2:] == [MALFORMED, "CLOSE names request ids"]
    assert everything(client.connection.dispatcher) == before
