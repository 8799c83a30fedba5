"""Transfer and accept: slots change hands with their states; never do both hold one, and never neither."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from daemons import SMALL_STATE, Daemon, wait_until
from fresh_pool import FreshPool, FreshPoolFactory, drain, granted, ids
from leased_clients import RECLAIM_S, RemoteClient, outage, restart, values
from processes import Children, paused

from mambapool.client import Worker
from mambapool.client.background import background
from mambapool.client.record import HELD, OFFERED, Record
from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.pool.errors import AllocatorUnavailable, DoubleFree, InvalidSlots, NotHolder

DaemonFactory = Callable[..., Daemon]


@pytest.fixture
def pool(new_pool: FreshPoolFactory) -> FreshPool:
    return new_pool(16)


@pytest.fixture
def giver(pool: FreshPool) -> Worker:
    """Holds 1 to 4."""
    worker = pool.connect(name="prefill")
    assert ids(worker.allocator.alloc(4)) == [1, 2, 3, 4]
    return worker


@pytest.fixture
def receiver(pool: FreshPool) -> Worker:
    return pool.connect(name="decode")


def refused_to_free(worker: Worker, *slots: int) -> str:
    with pytest.raises(NotHolder) as refusal:
        worker.allocator.free(torch.tensor(slots))
    assert refusal.value.slots == slots
    return str(refusal.value)


def test_the_states_arrive_with_the_slots(daemon_factory: DaemonFactory, children: Children) -> None:
    daemon = daemon_factory(slots=8, states=SMALL_STATE)
    giver, receiver = daemon.connect(), daemon.connect()
    slots = giver.allocator.alloc(3)
    assert slots is not None
    giver.states["temporal"][:, slots] = 7
    giver.transfer(slots[1:], to=receiver.session)
    accepted = receiver.accept()
    assert accepted is not None
    assert (accepted.dtype, ids(accepted)) == (torch.int64, [2, 3])
    assert values(receiver.states["temporal"][:, accepted]) == {7}
    holders = {holder["session"]: holder["held"] for holder in daemon.pool()["holders"]}
    assert holders == {giver.session: 1, receiver.session: 2}
    receiver.allocator.free(accepted)
    assert sorted(drain(receiver.allocator)) == [2, 3, 4, 5, 6, 7, 8]


def test_an_offer_is_the_givers_is_not_to_be_freed_and_is_shown(
    pool: FreshPool, giver: Worker, receiver: Worker
) -> None:
    giver.transfer(torch.tensor([2, 3]), to=receiver.session)
    status, holder = pool.status(), pool.holder(giver)
    assert (status["free"], status["held"], status["offered"]) == (12, 2, 2)
    assert (holder["held"], holder["offered"]) == (2, 2)
    assert pool.held_by(giver) == {1, 2, 3, 4}
    assert "offered" in refused_to_free(giver, 2)
    assert "offered" in refused_to_free(giver, 3, 2)
    with pytest.raises(NotHolder, match="slots 2 are offered"):
        giver.allocator.free(torch.tensor([1, 2]))
    assert pool.held_by(giver) == {1, 2, 3, 4}, "refused whole"
    assert ids(receiver.accept()) == [2, 3]
    assert pool.held_by(giver) == {1, 4}
    assert pool.held_by(receiver) == {2, 3}
    assert "not by this one" in refused_to_free(giver, 2)
    receiver.allocator.free(torch.tensor([2, 3]))
    assert pool.status()["offered"] == 0


def test_accept_without_an_offer_is_none_at_once_or_after_its_timeout(receiver: Worker) -> None:
    assert receiver.accept() is None
    began = time.monotonic()
    assert receiver.accept(timeout=0.2) is None
    assert 0.2 <= time.monotonic() - began < 0.7


def test_accept_waits_for_an_offer_while_other_calls_go_on(
    pool: FreshPool, giver: Worker, receiver: Worker
) -> None:
    accepted: list[torch.Tensor | None] = []
    waiting = threading.Thread(target=lambda: accepted.append(receiver.accept(timeout=10.0)))
    waiting.start()
    slot = receiver.allocator.alloc(1)
    assert slot is not None
    receiver.allocator.free(slot)
    assert receiver.allocator.available_size() == 12
    began = time.monotonic()
    giver.transfer(torch.tensor([4, 2]), to=receiver.session)
    waiting.join()
    assert time.monotonic() - began < 0.5
    assert sorted(ids(accepted[0])) == [2, 4]
    assert pool.held_by(receiver) == {2, 4}


def test_several_offers_are_accepted_one_by_one_in_their_order(
    pool: FreshPool, giver: Worker, receiver: Worker
) -> None:
    other = pool.connect()
    for slot in (3, 1):
        giver.transfer(torch.tensor([slot]), to=receiver.session)
    giver.transfer(torch.tensor([4]), to=other.session)
    assert [ids(receiver.accept()), ids(receiver.accept()), receiver.accept()] == [[3], [1], None]
    assert ids(other.accept()) == [4]


def test_a_giver_that_dies_takes_its_offer_with_it(pool: FreshPool, receiver: Worker, children: Children) -> None:
    remote = RemoteClient(children, pool)
    assert remote.ask("allocator.alloc(4)") == [1, 2, 3, 4]
    assert remote.ask(f"worker.transfer(torch.tensor([1, 2]), to={receiver.session})") is None
    assert pool.status()["offered"] == 2
    remote.kill()
    wait_until(lambda: pool.available == 16, "offered ones too are free", timeout=RECLAIM_S)
    assert receiver.accept() is None
    assert pool.status()["offered"] == 0
    assert sorted(drain(receiver.allocator)) == list(range(1, 17))


def test_a_receiver_that_dies_leaves_the_offer_plainly_the_givers(
    pool: FreshPool, giver: Worker, children: Children
) -> None:
    remote = RemoteClient(children, pool)
    giver.transfer(torch.tensor([2, 3]), to=remote.session)
    remote.kill()
    wait_until(lambda: pool.status()["offered"] == 0, "the offer has ended", timeout=RECLAIM_S)
    assert pool.held_by(giver) == {1, 2, 3, 4}
    assert pool.holder(giver)["held"] == 4
    giver.allocator.free(torch.tensor([3, 1]))
    giver.transfer(torch.tensor([2]), to=pool.owner.session)
    accepted = pool.owner.accept()
    assert ids(accepted) == [2]
    pool.owner.allocator.free(accepted)  # type: ignore[arg-type]
    wait_until(lambda: pool.available == 15, "all freed ones are free")


def test_slots_whose_offer_ended_with_its_receiver_are_held_and_cleared_as_before(
    pool: FreshPool, giver: Worker, receiver: Worker
) -> None:
    guaranteed = pool.connect(guarantee=3)
    giver.transfer(torch.tensor([1, 2, 3]), to=guaranteed.session)
    assert ids(guaranteed.accept()) == [1, 2, 3]
    guaranteed.transfer(torch.tensor([2, 3]), to=receiver.session)
    assert guaranteed.allocator.held() == [1]
    receiver.close()
    assert guaranteed.allocator.held() == [1, 2, 3]
    guaranteed.allocator.clear()
    wait_until(lambda: pool.available == 12, "only the guarantee and the giver's last one are held")
    assert pool.held_by(giver) == {4}


def test_a_giver_that_clears_ends_its_offers(pool: FreshPool, giver: Worker, receiver: Worker) -> None:
    giver.transfer(torch.tensor([2, 3]), to=receiver.session)
    giver.allocator.clear()
    wait_until(lambda: pool.available == 16, "what was offered is free, too")
    assert receiver.accept() is None
    assert sorted(drain(receiver.allocator)) == list(range(1, 17))


def test_an_offer_outlives_its_allocator(pool: FreshPool, giver: Worker, receiver: Worker) -> None:
    giver.transfer(torch.tensor([4, 2]), to=receiver.session)
    restart(pool.daemon)
    assert "offered" in refused_to_free(giver, 2)
    assert pool.status()["offered"] == 2
    assert sorted(ids(receiver.accept(timeout=5.0))) == [2, 4]
    assert (pool.held_by(giver), pool.held_by(receiver)) == ({1, 3}, {2, 4})
    restart(pool.daemon)
    assert receiver.accept() is None
    assert (pool.held_by(giver), pool.held_by(receiver)) == ({1, 3}, {2, 4})
    giver.transfer(torch.tensor([3]), to=receiver.session)
    assert ids(receiver.accept(timeout=5.0)) == [3]
    receiver.allocator.free(torch.tensor([4, 2, 3]))
    giver.allocator.free(torch.tensor([1]))
    wait_until(lambda: pool.available == 16, "all are free")


def test_an_offer_that_was_accepted_before_its_giver_could_ask_again_is_made(
    pool: FreshPool, giver: Worker, receiver: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocator made it and died before it said so; the next one has the receiver's request before the repeat."""
    ask = giver._transport.call

    def asked_again(op: int, *arguments: Any) -> list[Any]:
        ask(op, *arguments)
        restart(pool.daemon)
        assert sorted(ids(receiver.accept(timeout=5.0))) == [2, 4]
        return ask(op, *arguments)

    monkeypatch.setattr(giver._transport, "call", asked_again)
    giver.transfer(torch.tensor([4, 2]), to=receiver.session)
    assert (pool.held_by(giver), pool.held_by(receiver)) == ({1, 3}, {2, 4})
    assert giver.allocator.held() == [1, 3]
    assert "held by session" in refused_to_free(giver, 2)


def test_two_offers_to_one_receiver_are_two_after_a_restart(
    pool: FreshPool, giver: Worker, receiver: Worker
) -> None:
    giver.transfer(torch.tensor([1, 2]), to=receiver.session)
    giver.transfer(torch.tensor([4, 3]), to=receiver.session)
    restart(pool.daemon)
    assert ids(receiver.accept(timeout=5.0)) == [1, 2]
    assert sorted(ids(receiver.accept(timeout=5.0))) == [3, 4]


def test_an_offer_whose_answer_was_lost_in_a_restart_is_made_beside_an_earlier_one(
    pool: FreshPool, giver: Worker, receiver: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    giver.transfer(torch.tensor([1, 2]), to=receiver.session)
    ask = giver._transport.call

    def asked_again(op: int, *arguments: Any) -> list[Any]:
        ask(op, *arguments)
        restart(pool.daemon)
        return ask(op, *arguments)

    monkeypatch.setattr(giver._transport, "call", asked_again)
    giver.transfer(torch.tensor([3]), to=receiver.session)
    assert "offered" in refused_to_free(giver, 3)
    receiver.close()
    wait_until(lambda: not pool.status()["offered"], "the offers end with their receiver")
    giver.allocator.free(torch.tensor([3, 2]))
    pool.settle()
    assert pool.held_by(giver) == {1, 4}


@pytest.mark.parametrize("frees", [True, False])
def test_an_offer_that_nobody_answers_is_taken_back(pool: FreshPool, receiver: Worker, frees: bool) -> None:
    """It is in the allocator's queue all the same, before what the giver does then."""
    giver = pool.connect(timeout=0.5)
    assert ids(giver.allocator.alloc(4)) == [1, 2, 3, 4]
    with pool.daemon.stopped():
        with pytest.raises(AllocatorUnavailable):
            giver.transfer(torch.tensor([2, 3]), to=receiver.session)
        if frees:
            giver.allocator.free(torch.tensor([2, 3]))
    pool.settle()
    assert giver.allocator.available_size() == (14 if frees else 12)
    assert pool.status()["offered"] == 0
    assert receiver.accept() is None
    if not frees:
        giver.allocator.free(torch.tensor([2, 3]))
    pool.settle()
    assert pool.held_by(giver) == set(giver.allocator.held()) == {1, 4}


def test_slots_cannot_be_freed_while_their_offer_is_under_way(
    pool: FreshPool, giver: Worker, receiver: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot table does not show it yet: that it is not there does not mean that it was refused."""
    ask = giver._transport.call

    def freed_meanwhile(op: int, *arguments: Any) -> list[Any]:
        assert "offered" in refused_to_free(giver, 3, 2)
        return ask(op, *arguments)

    monkeypatch.setattr(giver._transport, "call", freed_meanwhile)
    giver.transfer(torch.tensor([2, 3]), to=receiver.session)
    assert ids(receiver.accept()) == [2, 3]
    assert pool.held_by(giver) == set(giver.allocator.held()) == {1, 4}


def test_an_offer_stands_when_a_free_before_it_is_refused(
    pool: FreshPool, giver: Worker, receiver: Worker
) -> None:
    background().remove(giver._transport)  # the notice of the refusal comes just before the offer's answer
    giver._transport.post(protocol.FREE, 9, 1)
    giver.transfer(torch.tensor([2, 3]), to=receiver.session)
    assert ids(receiver.accept()) == [2, 3]
    with pytest.raises(DoubleFree):
        giver.allocator.alloc(1)
    pool.settle()
    assert pool.held_by(giver) == set(giver.allocator.held()) == {1, 4}


def test_what_a_clear_has_freed_is_not_accepted(
    pool: FreshPool, giver: Worker, receiver: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread clears when the allocator has answered, and the receiver has not taken the answer yet."""
    ask = receiver._transport.call_and_wait

    def cleared_after(op: int, *arguments: Any, **options: Any) -> list[Any] | None:
        reply = ask(op, *arguments, **options)
        receiver.allocator.clear()
        return reply

    monkeypatch.setattr(receiver._transport, "call_and_wait", cleared_after)
    giver.transfer(torch.tensor([2, 3]), to=receiver.session)
    assert receiver.accept() is None
    pool.settle()
    assert pool.held_by(receiver) == set(receiver.allocator.held()) == set()
    assert pool.available == 14


def test_what_is_accepted_after_a_clear_that_went_by_is_kept(
    pool: FreshPool, giver: Worker, receiver: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = receiver._transport.call_and_wait

    def cleared_before(op: int, *arguments: Any, **options: Any) -> list[Any] | None:
        receiver.allocator.clear()
        receiver._transport.settle()
        return ask(op, *arguments, **options)

    monkeypatch.setattr(receiver._transport, "call_and_wait", cleared_before)
    giver.transfer(torch.tensor([2, 3]), to=receiver.session)
    assert ids(receiver.accept()) == [2, 3]
    assert pool.held_by(receiver) == set(receiver.allocator.held()) == {2, 3}


def test_who_dies_between_offer_and_accept_while_no_allocator_runs(
    new_pool: FreshPoolFactory, children: Children
) -> None:
    pairs = []
    for _ in range(2):
        pool = new_pool(16)
        pair = RemoteClient(children, pool), RemoteClient(children, pool)
        assert pair[0].ask("allocator.alloc(4)") == [1, 2, 3, 4]
        pair[0].ask(f"worker.transfer(torch.tensor([1, 2]), to={pair[1].session})")
        pairs.append((pool, *pair))
    (pool, giver, _), (other_pool, _, receiver) = pairs
    with outage(pool.daemon):
        for dying in (giver, receiver):
            dying.kill()
            dying.child.wait()
    assert pairs[0][2].ask("worker.accept()") is None
    assert pool.available == 16
    assert pairs[1][1].ask("allocator.free(torch.tensor([1, 2, 3, 4]))") is None
    wait_until(lambda: other_pool.available == 16, "the giver could free them")


def test_an_accept_that_timed_out_loses_nothing(pool: FreshPool, giver: Worker) -> None:
    """The offer may have been accepted by a message that nobody answered in time: it comes with the next call."""
    receiver = pool.connect(timeout=0.2)
    with paused(pool.daemon), pytest.raises(AllocatorUnavailable):
        receiver.accept(timeout=0.05)
    giver.transfer(torch.tensor([2, 3]), to=receiver.session)
    assert ids(receiver.accept(timeout=2.0)) == [2, 3]
    assert pool.held_by(receiver) == {2, 3}


def test_accepts_that_give_up_all_the_time_get_every_slot_once(pool: FreshPool, receiver: Worker) -> None:
    giver = pool.connect()
    got: list[int] = []
    over = threading.Event()

    def give() -> None:
        for _ in range(60):
            slots = giver.allocator.alloc(2, timeout=10.0)
            assert slots is not None
            giver.transfer(slots, to=receiver.session)
        over.set()

    giving = threading.Thread(target=give)
    giving.start()
    while not over.is_set() or pool.status()["offered"]:
        slots = receiver.accept(timeout=0.0003)
        if slots is not None:
            assert pool.held_by(receiver) == set(ids(slots))
            got += ids(slots)
            receiver.allocator.free(slots)
    giving.join()
    assert len(got) == 120
    wait_until(lambda: pool.available == 16, "all came back")


REFUSED_OFFERS = {
    "slots that somebody else holds": ([5], None, NotHolder),
    "slots of which one is free": ([1, 9], None, InvalidSlots),
    "the reserved slot": ([0, 1], None, InvalidSlots),
    "a slot that there is not": ([17], None, InvalidSlots),
    "a slot twice": ([1, 1], None, InvalidSlots),
    "no slots": ([], None, InvalidSlots),
    "to a session that there is not": ([1, 2], 10**6, InvalidSlots),
    "to a number that is none": ([1, 2], 0, InvalidSlots),
    "to itself": ([1, 2], -1, InvalidSlots),
}


@pytest.mark.parametrize("what", REFUSED_OFFERS)
def test_an_offer_that_cannot_be_made_is_refused_and_changes_nothing(
    pool: FreshPool, giver: Worker, receiver: Worker, what: str
) -> None:
    assert ids(receiver.allocator.alloc(2)) == [5, 6]
    slots, to, kind = REFUSED_OFFERS[what]
    to = giver.session if to == -1 else receiver.session if to is None else to
    with pytest.raises(kind):
        giver.transfer(torch.tensor(slots, dtype=torch.int64), to=to)
    assert pool.status()["offered"] == 0
    assert receiver.accept() is None
    giver.allocator.free(torch.tensor([1, 2, 3, 4]))
    wait_until(lambda: pool.available == 14, "the giver still could free them")


def test_a_slot_in_a_window_or_offered_already_cannot_be_offered(
    pool: FreshPool, giver: Worker, receiver: Worker
) -> None:
    giver.allocator.alloc_group_begin(2)
    with pytest.raises(InvalidSlots):
        giver.transfer(torch.tensor([5]), to=receiver.session)
    giver.transfer(torch.tensor([1]), to=receiver.session)
    with pytest.raises(NotHolder, match="offered"):
        giver.transfer(torch.tensor([1]), to=pool.owner.session)
    assert ids(receiver.accept()) == [1]
    assert pool.owner.accept() is None


def test_slots_of_a_guarantee_stay_with_it(pool: FreshPool, receiver: Worker) -> None:
    giver = pool.connect(guarantee=4)
    slots = giver.allocator.alloc(2)
    assert slots is not None
    with pytest.raises(NotHolder, match="guarantee"):
        giver.transfer(slots, to=receiver.session)
    assert receiver.accept() is None
    giver.allocator.free(slots)
    assert giver.allocator.available_size() == 4


def test_a_guaranteed_receiver_has_transferred_slots_on_top_and_can_free_them(
    pool: FreshPool, giver: Worker
) -> None:
    receiver = pool.connect(guarantee=4)
    giver.transfer(torch.tensor([2, 3]), to=receiver.session)
    accepted = receiver.accept()
    assert accepted is not None
    assert receiver.allocator.available_size() == 4
    assert len(drain(receiver.allocator)) == 4, "they are not of its own list"
    receiver.allocator.free(accepted)
    assert receiver.allocator.available_size() == 4
    wait_until(lambda: pool.available == 16 - 4 - 2, "the pool has them")
    # Passed on to a third one, they are of no concern to it any more, and its clear() frees what is left.
    giver.transfer(torch.tensor([1, 4]), to=receiver.session)
    assert ids(receiver.accept()) == [1, 4]
    receiver.transfer(torch.tensor([1]), to=pool.owner.session)
    assert ids(pool.owner.accept()) == [1]
    receiver.allocator.clear()
    wait_until(lambda: pool.held_by(receiver) == {5, 6, 7, 8}, "its guarantee is left")
    assert receiver.allocator.available_size() == 4
    assert pool.held_by(pool.owner) == {1}


def test_a_transferred_slot_does_not_count_against_the_givers_limit(pool: FreshPool, receiver: Worker) -> None:
    giver = pool.connect(limit=3)
    slots = giver.allocator.alloc(3)
    assert slots is not None
    giver.transfer(slots[:2], to=receiver.session)
    assert giver.allocator.available_size() == 0, "still the giver's"
    assert receiver.accept() is not None
    assert giver.allocator.available_size() == 2
    assert len(ids(giver.allocator.alloc(2))) == 2
    assert giver.allocator.available_size() == 0


def test_an_offer_beyond_the_receivers_limit_waits_until_there_is_room(pool: FreshPool, giver: Worker) -> None:
    receiver = pool.connect(limit=3)
    slots = receiver.allocator.alloc(2)
    assert slots is not None
    giver.transfer(torch.tensor([1, 2]), to=receiver.session)
    with pytest.raises(AllocatorUnavailable, match="limit of 3"):
        receiver.accept()
    assert pool.held_by(giver) == {1, 2, 3, 4}
    receiver.allocator.free(slots)
    assert ids(receiver.accept(timeout=5.0)) == [1, 2]


def test_an_offer_that_a_waiting_receiver_has_no_room_for_is_its_error_and_not_the_givers(
    pool: FreshPool, giver: Worker
) -> None:
    receiver = pool.connect(limit=3)
    assert ids(receiver.allocator.alloc(2)) == [5, 6]
    before = receiver.messages
    errors: list[AllocatorUnavailable] = []

    def accept() -> None:
        with pytest.raises(AllocatorUnavailable, match="limit of 3") as refusal:
            receiver.accept(timeout=30.0)
        errors.append(refusal.value)

    waiting = threading.Thread(target=accept)
    waiting.start()
    wait_until(lambda: receiver.messages > before, "it has asked")
    assert pool.holder(receiver), "and the allocator has answered somebody since"
    giver.transfer(torch.tensor([1, 2]), to=receiver.session)
    waiting.join()
    assert len(errors) == 1
    assert pool.status()["offered"] == 2
    receiver.allocator.clear()
    assert ids(receiver.accept(timeout=5.0)) == [1, 2]


def test_both_sides_free_at_once_and_one_of_them_is_refused(
    pool: FreshPool, giver: Worker, receiver: Worker
) -> None:
    giver.allocator.clear()
    barrier = threading.Barrier(2)
    outcomes: list[str] = []

    def free(worker: Worker, slots: torch.Tensor) -> None:
        barrier.wait()
        try:
            worker.allocator.free(slots)
            outcomes.append("freed")
        except InvalidSlots:
            outcomes.append("refused")

    for _ in range(60):
        slots = giver.allocator.alloc(8, timeout=10.0)
        assert slots is not None
        giver.transfer(slots, to=receiver.session)
        assert receiver.accept() is not None
        threads = [threading.Thread(target=free, args=(worker, slots)) for worker in (giver, receiver)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["freed", "refused"]
        outcomes.clear()
        wait_until(lambda: pool.available == 16, "each is free once")
    assert sorted(drain(pool.owner.allocator)) == list(range(1, 17))


def test_a_slot_that_came_back_into_the_givers_window_is_not_the_givers_to_free(
    pool: FreshPool, giver: Worker, receiver: Worker
) -> None:
    """It was accepted, freed, and granted again; nobody was handed it yet."""
    giver.transfer(torch.tensor([2, 3]), to=receiver.session)
    receiver.allocator.free(granted(receiver.accept()))
    pool.settle()
    giver.allocator.alloc_group_begin(14)
    for slot in (2, 3):
        with pytest.raises(DoubleFree):
            giver.allocator.free(torch.tensor([slot]))
    assert giver.allocator.held() == [1, 4]
    window = [int(granted(giver.allocator.alloc(1))) for _ in range(14)]
    assert window[-2:] == [2, 3]
    giver.allocator.free(torch.tensor(window))
    giver.allocator.alloc_group_end()
    pool.settle()
    assert pool.held_by(giver) == {1, 4}


class _AcceptedMeanwhile(st.SlotTableReader):
    """A table in which an offer is accepted between two looks at it: the owner changes, then the offer goes."""

    def __init__(self, path: object, uuid: bytes | None = None) -> None:
        super().__init__(path, uuid)  # type: ignore[arg-type]
        self.looks = 0

    def holder_of(self, slot: int) -> int:
        self.looks += 1
        return 1 if self.looks == 1 else 2

    def offered_to(self, slot: int) -> int:
        self.looks += 1
        return 2 if self.looks == 1 else 0


def test_a_slot_that_is_accepted_while_it_is_looked_at_is_not_taken_for_the_givers(pool: FreshPool) -> None:
    table = _AcceptedMeanwhile(pool.daemon.directory.slot_table(pool.name))
    record = Record(table, session=1)
    record.hold([3])
    record.offering([3])
    record.offered([3])
    assert record.marks[3] == OFFERED
    table.looks = 0
    with pytest.raises(NotHolder):
        record.give_back([3])
    assert record.marks[3] != HELD
