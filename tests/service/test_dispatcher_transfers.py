"""OFFER and ACCEPT: slots change their holder whole and once, however often it is asked and whoever goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dispatching import EPOCH, Client, Connection, everything, ids, slots_of
from leases import TestLeases

from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.pool.protocol import CANCEL, CLEAR, FREE, MALFORMED, NONE, NOT_OPEN, OK, REFUSED
from mambapool.service.pools import Pool

Join = Callable[[str], Client]


@pytest.fixture
def receiver(client: Client, join: Join) -> Client:
    """Another session; the first one holds 1 to 6."""
    client.alloc(6)
    return join("receiver")


def held(pool: Pool, client: Client) -> tuple[list[int], int]:
    """What a session holds as the table has it, and how many of them are offered."""
    slots: list[int] = pool.table.held_by(st.owner_word(client.number)).tolist()
    return slots, client.session.offered


def test_an_offer_stays_the_givers_and_cannot_be_freed(client: Client, receiver: Client, pool: Pool) -> None:
    assert client.offer(receiver.number, 3, 1) == [3, EPOCH, OK]
    assert held(pool, client) == ([1, 2, 3, 4, 5, 6], 2)
    word = st.offered_word(receiver.number, 3)
    assert pool.table.offers[[1, 2, 3]].tolist() == [word, 0, word]
    refused = client.post(FREE, ids(2, 3, 1))
    assert refused is not None
    assert refused[2:] == [protocol.NOT_HOLDER, ids(3, 1), "slots 3, 1 are offered to another session"]
    assert client.post(FREE, 2) is None
    assert client.offer(receiver.number, 4, 3)[2:4] == [protocol.NOT_HOLDER, ids(3)]
    assert held(pool, client) == ([1, 3, 4, 5, 6], 2)


def test_an_accept_takes_the_oldest_offer_whole_in_one_change(
    client: Client, receiver: Client, pool: Pool
) -> None:
    client.offer(receiver.number, 5, 2)
    client.offer(receiver.number, 6)
    before = pool.table._items[st.H_SEQ]
    assert receiver.accept() == [2, EPOCH, OK, ids(2, 5)]
    assert pool.table._items[st.H_SEQ] == before + 1
    assert (held(pool, client), held(pool, receiver)) == (([1, 3, 4, 6], 1), ([2, 5], 0))
    assert receiver.accept() == [3, EPOCH, OK, 6]
    assert receiver.accept() == [4, EPOCH, NONE]
    assert receiver.post(FREE, ids(5, 6, 2)) is None
    refused = client.post(FREE, 2)
    assert refused is not None
    assert refused[2] == protocol.DOUBLE_FREE


def test_a_transferred_slot_keeps_its_generation(client: Client, receiver: Client, pool: Pool) -> None:
    client.offer(receiver.number, 3)
    receiver.accept()
    assert pool.table.generations[3] == 1
    receiver.post(FREE, 3)
    client.alloc(11)
    assert pool.table.generations[3] == 2


def test_an_accept_that_waits_is_answered_with_the_offer(client: Client, receiver: Client, pool: Pool) -> None:
    assert receiver.accept(wait=True) is None
    assert (client.late(), receiver.late()) == ([], [])
    assert client.offer(receiver.number, 4)[2] == OK
    assert receiver.late() == [[2, EPOCH, OK, 4]]
    assert receiver.accept(id=2) == [2, EPOCH, OK, 4], "asked again: the same answer"
    assert client.offer(receiver.number, 5)[2] == OK
    assert (receiver.late(), held(pool, receiver)) == ([], ([4], 0)), "nobody waits any more"


def test_an_accept_that_is_asked_again_without_waiting_waits_no_longer(client: Client, receiver: Client) -> None:
    assert receiver.accept(wait=True) is None
    assert receiver.accept(id=2) == [2, EPOCH, NONE]
    client.offer(receiver.number, 4)
    assert receiver.late() == []


def test_a_cancelled_accept_waits_no_longer_and_is_not_open(client: Client, receiver: Client) -> None:
    assert receiver.accept(wait=True) is None
    assert receiver.post(CANCEL, 2) is None
    client.offer(receiver.number, 4)
    assert receiver.late() == []
    assert receiver.accept(wait=True, id=2)[2] == NOT_OPEN  # type: ignore[index]
    assert receiver.accept() == [3, EPOCH, OK, 4]


def test_a_cancel_does_not_take_back_what_was_accepted(client: Client, receiver: Client, pool: Pool) -> None:
    client.offer(receiver.number, 4, 5)
    first = receiver.accept()
    assert receiver.post(CANCEL, 2) is None
    assert held(pool, receiver) == ([4, 5], 0)
    assert receiver.accept(id=2) == first
    assert receiver.session.applied == 1


def test_repeats_of_offer_and_accept_are_answered_as_before_and_change_nothing(
    client: Client, receiver: Client
) -> None:
    client.offer(receiver.number, 2, 3, id=9)
    offered = everything(client.connection.dispatcher)
    assert client.offer(receiver.number, 2, 3, id=9) == [9, EPOCH, OK]
    assert everything(client.connection.dispatcher) == offered
    accepted = receiver.accept(id=9)
    after = everything(client.connection.dispatcher)
    assert receiver.accept(id=9) == accepted
    assert client.offer(receiver.number, 2, 3, id=9) == [9, EPOCH, OK]
    assert everything(client.connection.dispatcher) == after


def test_an_offer_that_an_allocator_before_this_one_took_is_not_made_twice(
    client: Client, receiver: Client, pool: Pool
) -> None:
    """Its reply was lost with that allocator, so that it comes under an id that this one does not know."""
    client.offer(receiver.number, 2, 3)
    assert client.offer(receiver.number, 3, 2)[2:] == [OK]
    assert (len(pool.offers), client.session.offered) == (1, 2)


def test_a_cancel_takes_an_offer_back_or_bars_one_that_has_not_come(
    client: Client, receiver: Client, pool: Pool
) -> None:
    client.offer(receiver.number, 1, 2)
    client.offer(receiver.number, 3)
    first = client.request_id - 1
    assert client.post(CANCEL, first) is None
    assert held(pool, client) == ([1, 2, 3, 4, 5, 6], 1)
    assert client.post(FREE, ids(2, 1)) is None
    assert client.post(CANCEL, client.request_id + 1) is None
    assert client.offer(receiver.number, 4)[2] == NOT_OPEN
    assert receiver.accept() == [2, EPOCH, OK, 3]
    assert receiver.accept() == [3, EPOCH, NONE]
    assert client.post(CANCEL, first + 1) is None
    assert held(pool, receiver) == ([3], 0), "what was accepted is not taken back"


def bad_offers() -> list[Any]:
    """Of a client, session 1, that holds 1 to 6 of 16 slots; session 2 holds nothing."""
    cases = {
        "to nobody": (9, [1], protocol.INVALID_SLOTS, [1]),
        "to itself": (1, [1, 2], protocol.INVALID_SLOTS, [1, 2]),
        "of free ones": (2, [1, 9, 8], protocol.DOUBLE_FREE, [9, 8]),
        "of the reserved one": (2, [1, 0], protocol.RESERVED_SLOT, [0]),
        "out of range": (2, [17, 1, -1], protocol.SLOT_OUT_OF_RANGE, [17, -1]),
        "twice": (2, [1, 2, 1], protocol.DUPLICATE_SLOT, [1]),
    }
    return [pytest.param(*case, id=name) for name, case in cases.items()]


@pytest.mark.parametrize(("to", "slots", "status", "named"), bad_offers())
@pytest.mark.usefixtures("receiver")
def test_a_bad_offer_is_refused_whole(
    client: Client, pool: Pool, to: int, slots: list[int], status: int, named: list[int]
) -> None:
    reply = client.offer(to, *slots)
    assert (reply[2], slots_of(reply)) == (status, named)
    assert (list(pool.offers), held(pool, client)) == ([], ([1, 2, 3, 4, 5, 6], 0))


def test_what_another_session_holds_cannot_be_offered(client: Client, receiver: Client, pool: Pool) -> None:
    reply = receiver.offer(client.number, 3)
    assert reply[2:] == [protocol.NOT_HOLDER, ids(3), f"slots 3 are held by 1, not by {receiver.number}"]
    assert not pool.offers


@pytest.mark.parametrize(
    "arguments",
    [(b"", 2), (None, 2), ("1", 2), ([1], 2), (b"\1\0\0", 2), (1, None), (1, "2"), (1, True), (1, 2.0)],
)
@pytest.mark.usefixtures("receiver")
def test_an_offer_of_no_slots_or_to_no_number_is_refused(client: Client, arguments: tuple[Any, Any]) -> None:
    before = everything(client.connection.dispatcher)[0]
    reply = client.request(protocol.OFFER, *arguments)
    assert reply[2] in (MALFORMED, protocol.INVALID_SLOTS)
    assert everything(client.connection.dispatcher)[0] == before


@pytest.mark.parametrize("wait", [0, 1, None, "true", b""])
def test_whether_to_wait_is_true_or_false(client: Client, wait: Any) -> None:
    before = everything(client.connection.dispatcher)
    for reply in (client.send(protocol.ACCEPT, wait), client.send(protocol.ALLOC, 1, None, wait)):
        assert reply is not None
        assert reply[2] == MALFORMED
        assert "wait" in reply[3]
    assert everything(client.connection.dispatcher) == before


# Who goes in between.


@pytest.mark.parametrize("how", ["detach", "death", "clear"])
def test_an_offer_ends_with_what_its_giver_holds(
    client: Client, receiver: Client, pool: Pool, leases: TestLeases, how: str
) -> None:
    client.offer(receiver.number, 3, 1)
    end(client, how, leases)
    assert receiver.accept() == [2, EPOCH, NONE]
    assert (list(pool.offers), pool.ledger.free_count) == ([], 16)
    assert not pool.table.offers.any()


@pytest.mark.parametrize("how", ["detach", "death"])
def test_an_offer_to_one_that_goes_is_plainly_the_givers_again(
    client: Client, receiver: Client, pool: Pool, leases: TestLeases, how: str
) -> None:
    client.offer(receiver.number, 3, 1)
    client.offer(receiver.number, 2)
    end(receiver, how, leases)
    assert (list(pool.offers), held(pool, client)) == ([], ([1, 2, 3, 4, 5, 6], 0))
    assert client.post(FREE, ids(1, 2, 3)) is None


@pytest.mark.parametrize("how", ["detach", "death"])
def test_what_was_accepted_goes_with_its_new_holder(
    client: Client, receiver: Client, pool: Pool, leases: TestLeases, how: str
) -> None:
    client.offer(receiver.number, 3, 1)
    receiver.accept()
    end(client, how, leases)
    assert held(pool, receiver) == ([1, 3], 0)
    end(receiver, how, leases)
    assert pool.ledger.free_count == 16


def test_an_accept_that_waits_goes_with_its_session(
    client: Client, receiver: Client, pool: Pool, leases: TestLeases
) -> None:
    assert receiver.accept(wait=True) is None
    end(receiver, "death", leases)
    assert client.offer(receiver.number, 3)[2] == protocol.INVALID_SLOTS
    assert (receiver.late(), list(pool.offers)) == ([], [])


def end(client: Client, how: str, leases: TestLeases) -> None:
    """A session ends, or frees all that it holds."""
    if how == "death":
        leases.dead.add(client.lease)
        client.connection.dispatcher.lease_released(client.lease, "its process ended")
    elif how == "detach":
        assert client.request(protocol.DETACH)[2] == OK
    else:
        assert client.post(CLEAR) is None


# Limits and guarantees.


def test_an_offer_beyond_the_receivers_limit_stays_until_there_is_room(
    client: Client, join: Join, pool: Pool
) -> None:
    client.alloc(6)
    small = Client(Connection(client.connection.dispatcher, b"zmq-small"), b"small".ljust(16), {"limit": 3})
    small.alloc(1)
    client.offer(small.number, 1, 2, 3)
    refused = small.accept()
    assert refused is not None
    assert refused[2:] == [REFUSED, "3 slots are offered, and the limit of 3 leaves room for 2"]
    assert held(pool, client) == ([1, 2, 3, 4, 5, 6], 3)
    small.post(FREE, 7)
    assert small.accept() == [4, EPOCH, OK, ids(1, 2, 3)]


def test_slots_of_a_guarantee_cannot_be_offered_and_accepted_ones_can(
    client: Client, receiver: Client, pool: Pool
) -> None:
    sure = Client(Connection(client.connection.dispatcher, b"zmq-sure"), b"sure".ljust(16), {"guarantee": 4})
    assert sure.session.held == 4
    reply = sure.offer(receiver.number, 8, 9)
    assert (reply[2], slots_of(reply)) == (protocol.NOT_HOLDER, [8, 9])
    client.offer(sure.number, 3)
    assert sure.accept() == [3, EPOCH, OK, 3]
    assert sure.offer(receiver.number, 3)[2] == OK
    assert receiver.accept() == [2, EPOCH, OK, 3]
    assert pool.guaranteed_ids(sure.session).tolist() == [7, 8, 9, 10]


def test_an_accepted_slot_is_in_no_window(client: Client, receiver: Client, pool: Pool) -> None:
    receiver.begin(2, id=9)
    client.offer(receiver.number, 3)
    receiver.accept(id=10)
    assert pool.windows() == {receiver.number: 2}
