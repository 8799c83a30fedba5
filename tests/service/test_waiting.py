"""The queue of those that wait, and whose turn it is when slots come free."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from dispatching import Client, Connection, hello_map, ids, make_session, slots_of
from leases import TestLeases

from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.pool.errors import AllocatorUnavailable
from mambapool.service.dispatcher import Dispatcher
from mambapool.service.pools import Pool
from mambapool.service.sessions import Session
from mambapool.service.waiting import Waiter, WaitQueue

Join = Callable[[str], Client]


@pytest.fixture
def first(pool: Pool) -> Session:
    return make_session(pool, 1)


@pytest.fixture
def second(pool: Pool) -> Session:
    return make_session(pool, 2)


def test_the_queue_serves_in_order_and_counts_the_slots(first: Session, second: Session) -> None:
    queue = WaitQueue(8)
    waiters = [Waiter(s, r, protocol.ALLOC, c) for s, r, c in ((first, 5, 3), (second, 5, 1), (first, 6, 2))]
    assert not queue
    for waiter in waiters:
        queue.add(waiter)
    assert (len(queue), queue.slots, queue.head) == (3, 6, waiters[0])
    assert queue.find(second, 5) is waiters[1]
    assert queue.find(second, 6) is None
    assert [queue.pop() for _ in range(3)] == waiters
    assert (bool(queue), queue.slots) == (False, 0)


def test_one_request_of_a_session_leaves_or_all_of_them(first: Session, second: Session) -> None:
    queue = WaitQueue(8)
    for session, request, count in ((first, 5, 3), (second, 5, 1), (first, 6, 2)):
        queue.add(Waiter(session, request, protocol.ALLOC, count))
    assert queue.remove(first, 7) is False
    assert queue.remove(first, 5) is True
    assert (queue.slots, queue.head.session) == (3, second)
    assert queue.remove(first) is True
    assert queue.remove(first) is False
    assert (len(queue), queue.slots) == (1, 1)


def test_a_full_queue_refuses_and_says_what_to_do(first: Session) -> None:
    queue = WaitQueue(2)
    for request in (5, 6):
        queue.add(Waiter(first, request, protocol.ALLOC, 1))
    with pytest.raises(AllocatorUnavailable, match=r"2 requests wait .*--max-waiters"):
        queue.add(Waiter(first, 7, protocol.ALLOC, 1))
    assert (len(queue), queue.slots) == (2, 2)


def shown(pool: Pool) -> int:
    """How many slots the table says that somebody waits for."""
    return int(pool.table._items[st.H_WAITING])


def test_a_free_serves_all_that_it_is_enough_for_in_its_own_step(pool: Pool, client: Client, join: Join) -> None:
    assert slots_of(client.alloc(16)) == list(range(1, 17))
    waiting = [join(name) for name in ("a", "b", "c")]
    for one, count in zip(waiting, (2, 1, 3), strict=True):
        assert one.wait_for(count) is None
    assert (pool.waiting.slots, shown(pool)) == (6, 6)
    client.post(protocol.FREE, 9)
    assert [one.late() for one in waiting] == [[], [], []], "nobody passes the first"
    client.post(protocol.FREE, ids(4, 7))
    assert [slots_of(reply) for reply in waiting[0].late()] == [[9, 4]]
    assert [slots_of(reply) for reply in waiting[1].late()] == [[7]]
    assert (waiting[2].late(), shown(pool)) == ([], 3)
    client.post(protocol.FREE, ids(1, 2, 3))
    assert [slots_of(reply) for reply in waiting[2].late()] == [[1, 2, 3]]
    assert shown(pool) == 0


def test_what_a_request_carries_is_first_for_those_that_wait(pool: Pool, client: Client, join: Join) -> None:
    client.alloc(16)
    waiting = join("a")
    assert waiting.wait_for(2) is None
    assert client.alloc(1, frees=ids(5, 6))[2] == protocol.NONE
    assert [slots_of(reply) for reply in waiting.late()] == [[5, 6]]
    assert slots_of(client.alloc(1, frees=8)) == [8], "nobody waits any more"


@pytest.mark.parametrize("op", [protocol.ALLOC, protocol.BEGIN])
def test_nobody_overtakes_whatever_is_free(pool: Pool, client: Client, join: Join, op: int) -> None:
    client.alloc(12)
    waiting, other = join("a"), join("b")
    assert waiting.wait_for(5) is None
    if op == protocol.ALLOC:
        assert other.alloc(1)[2] == protocol.NONE
    else:
        assert other.begin(1)[2] == protocol.NONE
        assert other.begin(4, partial=True)[2] == protocol.NONE
    assert pool.ledger.free_count == 4
    assert waiting.late() == []


def test_a_repeat_of_a_request_that_waits_neither_waits_twice_nor_is_answered(
    pool: Pool, client: Client, join: Join
) -> None:
    client.alloc(16)
    waiting = join("a")
    assert waiting.wait_for(3) is None
    assert waiting.wait_for(3, id=waiting.request_id) is None
    assert (len(pool.waiting), pool.waiting.slots) == (1, 3)
    client.post(protocol.FREE, ids(1, 2, 3))
    (reply,) = waiting.late()
    assert waiting.wait_for(3, id=waiting.request_id) == reply, "and from then on it gets the same answer"


def test_a_cancelled_request_leaves_the_queue_and_those_behind_it_are_served(
    pool: Pool, client: Client, join: Join
) -> None:
    client.alloc(14)
    large, small = join("a"), join("b")
    assert large.wait_for(10) is None
    assert small.wait_for(2) is None
    large.post(protocol.CANCEL, large.request_id)
    assert [slots_of(reply) for reply in small.late()] == [[15, 16]]
    assert (shown(pool), large.late()) == (0, [])
    assert large.request(protocol.ALLOC, 10, None, True, id=large.request_id)[2] == protocol.NOT_OPEN


def test_the_last_one_that_waits_goes_and_the_table_says_so(pool: Pool, client: Client, join: Join) -> None:
    client.alloc(16)
    waiting = join("a")
    assert waiting.wait_for(2) is None
    assert shown(pool) == 2
    waiting.post(protocol.CANCEL, waiting.request_id)
    assert shown(pool) == 0


def test_a_death_takes_the_wait_along_and_its_slots_go_to_who_waits(
    pool: Pool, client: Client, join: Join, dispatcher: Dispatcher, leases: TestLeases
) -> None:
    client.alloc(16)
    doomed, waiting = join("a"), join("b")
    assert doomed.wait_for(2) is None
    assert waiting.wait_for(16) is None
    for dead in (doomed, client):
        leases.dead.add(dead.lease)
        dispatcher.lease_released(dead.lease, "its process ended")
    assert [sorted(slots_of(reply)) for reply in waiting.late()] == [list(range(1, 17))]
    assert (doomed.late(), shown(pool)) == ([], 0)


def test_a_hint_at_a_living_one_takes_nothing(
    pool: Pool, client: Client, join: Join, dispatcher: Dispatcher
) -> None:
    client.alloc(16)
    waiting = join("a")
    assert waiting.wait_for(1) is None
    dispatcher.lease_released(client.lease, "its connection closed")
    dispatcher.lease_released(b"?" * 16, "its connection closed")
    assert waiting.late() == []
    assert pool.sessions.keys() == {client.number, waiting.number}


def test_a_session_at_its_own_limit_does_not_hold_up_the_others(
    pool: Pool, connection: Connection, join: Join, dispatcher: Dispatcher
) -> None:
    limited = Client(Connection(dispatcher, b"zmq-l"), b"l" * 16, {"limit": 2})
    limited.alloc(2)
    reply = limited.wait_for(1)
    assert reply is not None
    assert (reply[2], shown(pool)) == (protocol.NONE, 0)
    assert slots_of(join("a").alloc(14)) == list(range(3, 17))


def test_a_session_without_a_limit_waits_for_what_its_own_threads_free(pool: Pool, client: Client) -> None:
    client.alloc(16)
    assert client.wait_for(2) is None
    client.post(protocol.FREE, ids(3, 4))
    assert [slots_of(reply) for reply in client.late()] == [[3, 4]]


def test_a_guarantee_waits_its_turn_and_is_greeted_when_it_comes(
    pool: Pool, client: Client, join: Join, dispatcher: Dispatcher
) -> None:
    client.alloc(12)
    other = join("a")
    connection = Connection(dispatcher, b"zmq-g")
    hello = (protocol.HELLO, 0, 1, 0, 0, 0, hello_map(b"G" * 16, guarantee=6))
    assert connection.send(*hello) is None
    assert connection.send(*hello) is None, "said again while it waits"
    assert (len(pool.waiting), other.alloc(1)[2]) == (1, protocol.NONE)
    client.post(protocol.FREE, ids(2, 1))
    (greeting,) = connection.late()
    assert greeting[2] == protocol.OK
    assert protocol.unpack_ids(greeting[3]["granted"]).tolist() == [13, 14, 15, 16, 2, 1]
    reply = connection.ask(*hello)
    assert reply[3]["granted"] == greeting[3]["granted"], "said again it is greeted the same way"


def test_an_offer_beyond_a_waiting_receivers_limit_is_answered_to_both(
    pool: Pool, client: Client, dispatcher: Dispatcher
) -> None:
    client.alloc(4)
    receiver = Client(Connection(dispatcher, b"zmq-r"), b"r" * 16, {"limit": 2})
    receiver.alloc(1)
    assert receiver.accept(wait=True) is None
    assert client.offer(receiver.number, 1, 2)[2] == protocol.OK
    (refusal,) = receiver.late()
    assert (refusal[0], refusal[2]) == (receiver.request_id, protocol.REFUSED)
    assert "limit of 2" in refusal[3]
    assert client.session.offered == 2
    receiver.post(protocol.CLEAR)
    reply = receiver.accept()
    assert reply is not None
    assert slots_of(reply) == [1, 2]
