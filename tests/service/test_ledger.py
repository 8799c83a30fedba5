from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from mambapool.pool import errors
from mambapool.service.ledger import SMALL_BATCH, Ids, Ledger

A, B = 7, 8
SLOTS = 40

#: One slot, a loop over memoryviews, the last batch of that kind, the first one of numpy, and a larger one.
BATCHES = [2, SMALL_BATCH, SMALL_BATCH + 1, 30]


def array(slots: list[int]) -> Ids:
    return np.array(slots, np.int32)


def take(ledger: Ledger, count: int, holder: int) -> list[int]:
    taken = ledger.take(count, holder)
    assert taken is not None
    slots: list[int] = taken[0].tolist()
    return slots


def free_list(ledger: Ledger) -> list[int]:
    slots: list[int] = ledger.free_slots().tolist()
    return slots


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(SLOTS)


def test_a_new_pool_has_every_slot_in_ascending_order(ledger: Ledger) -> None:
    assert free_list(ledger) == list(range(1, SLOTS + 1))
    assert repr(ledger) == "Ledger(slots=40, free=40)"


@pytest.mark.parametrize("count", BATCHES)
def test_slots_leave_at_the_head_and_come_back_at_the_tail_in_the_order_given(ledger: Ledger, count: int) -> None:
    taken = take(ledger, count, A)
    assert taken == list(range(1, count + 1))
    returned = taken[::2] + taken[1::2]
    ledger.give_back(array(returned), A)
    assert free_list(ledger) == [*range(count + 1, SLOTS + 1), *returned]
    ledger.check()


def test_single_slots_leave_and_come_back_in_the_same_order(ledger: Ledger) -> None:
    assert [ledger.take_one(A) for _ in range(3)] == [1, 2, 3]
    for slot in (2, 3, 1):
        ledger.give_back_one(slot, A)
    assert free_list(ledger) == [*range(4, SLOTS + 1), 2, 3, 1]
    ledger.check()


def test_a_pool_of_one_slot_hands_it_out_again_and_again() -> None:
    ledger = Ledger(1)
    for generation in range(1, 4):
        assert ledger.take_one(A) == 1
        assert ledger.take_one(A) == 0
        assert ledger.take(1, A) is None
        assert (ledger.generation_of(1), ledger.holder_of(1)) == (generation, A)
        ledger.give_back(array([1]), A)
        ledger.check()
    assert free_list(ledger) == [1]


@pytest.mark.parametrize("count", [1, *BATCHES])
def test_the_ring_wraps_around_without_losing_its_order(ledger: Ledger, count: int) -> None:
    expected = list(range(1, SLOTS + 1))
    for _ in range(3 * SLOTS):
        taken = take(ledger, count, A)
        assert taken == expected[:count]
        ledger.give_back(array(taken[::-1]), A)
        expected = expected[count:] + taken[::-1]
        assert free_list(ledger) == expected
    ledger.check()


def test_all_slots_can_be_taken_at_once_wherever_the_head_is(ledger: Ledger) -> None:
    for head in range(SLOTS):
        assert sorted(take(ledger, SLOTS, A)) == list(range(1, SLOTS + 1))
        assert free_list(ledger) == []
        ledger.check()
        ledger.give_back(array(list(range(1, SLOTS + 1))), A)
        ledger.give_back_one(take(ledger, 1, B)[0], B)
        assert ledger.free_count == SLOTS, head


def test_nothing_changes_when_fewer_are_free_than_asked_for(ledger: Ledger) -> None:
    take(ledger, SLOTS - 2, A)
    assert ledger.take(3, B) is None
    assert free_list(ledger) == [SLOTS - 1, SLOTS]
    assert take(ledger, 2, B) == [SLOTS - 1, SLOTS]
    assert ledger.take_one(B) == 0
    ledger.check()


def test_generations_count_how_often_a_slot_was_handed_out(ledger: Ledger) -> None:
    taken = ledger.take(20, A)
    assert taken is not None
    ids, generations = taken
    assert generations.tolist() == [1] * 20
    ledger.give_back(ids, A)
    take(ledger, 20, B)
    assert ledger.take_one(A) == 1
    assert [ledger.generation_of(slot) for slot in (1, 2, 21)] == [2, 1, 1]


def test_the_holder_of_a_slot_is_known_until_it_is_free(ledger: Ledger) -> None:
    ids = take(ledger, 3, A)
    assert [ledger.holder_of(slot) for slot in (1, 2, 3, 4)] == [A, A, A, 0]
    assert ledger.held_by(A).tolist() == ids
    ledger.give_back_one(2, A)
    assert ledger.holder_of(2) == 0
    assert ledger.held_by(A).tolist() == [1, 3]


def test_releasing_a_holder_leaves_everybody_else_alone(ledger: Ledger) -> None:
    take(ledger, 3, A)
    take(ledger, 2, B)
    take(ledger, 2, A)
    assert ledger.release(A).tolist() == [1, 2, 3, 6, 7]
    assert free_list(ledger) == [*range(8, SLOTS + 1), 1, 2, 3, 6, 7]
    assert ledger.held_by(B).tolist() == [4, 5]
    ledger.check()


def test_the_list_is_in_ascending_order_again_once_a_release_leaves_all_free(ledger: Ledger) -> None:
    ledger.give_back(array(take(ledger, 20, A)[::-1]), A)
    take(ledger, 30, A)
    ledger.release(A)
    assert free_list(ledger) == list(range(1, SLOTS + 1))
    ledger.check()


def test_releasing_who_holds_nothing_changes_nothing(ledger: Ledger) -> None:
    take(ledger, 2, A)
    assert ledger.release(B).tolist() == []
    assert ledger.held_by(A).tolist() == [1, 2]


def test_an_offered_slot_is_its_holders_and_cannot_be_freed_or_offered_again(ledger: Ledger) -> None:
    take(ledger, 6, A)
    take(ledger, 2, B)
    ledger.offer(array([4, 2]), A)
    assert (ledger.holder_of(2), ledger.held_by(A).tolist()) == (A, [1, 2, 3, 4, 5, 6])
    for call in (ledger.give_back, ledger.offer):
        with pytest.raises(errors.NotHolder, match="slots 2, 4 are offered to another session") as caught:
            call(array([1, 2, 7, 4]), A)
        assert caught.value.slots == (2, 4)
    with pytest.raises(errors.NotHolder):
        ledger.give_back_one(4, A)
    ledger.give_back(array([1, 3]), A)
    ledger.check()


def test_an_offer_that_ends_leaves_a_slot_its_holders(ledger: Ledger) -> None:
    take(ledger, 4, A)
    ledger.offer(array([4, 2]), A)
    ledger.withdraw(array([4, 2]), A)
    ledger.give_back(array([1, 2, 3, 4]), A)
    assert free_list(ledger)[-4:] == [1, 2, 3, 4]
    ledger.check()


def test_an_accepted_slot_is_the_other_ones(ledger: Ledger) -> None:
    take(ledger, 4, A)
    ledger.offer(array([4, 2]), A)
    ledger.hand_over(array([4, 2]), B)
    assert (ledger.held_by(A).tolist(), ledger.held_by(B).tolist()) == ([1, 3], [2, 4])
    with pytest.raises(errors.NotHolder, match=f"slots 2 are held by {B}, not by {A}"):
        ledger.give_back_one(2, A)
    ledger.give_back(array([4, 2]), B)
    assert ledger.generation_of(4) == 1
    ledger.check()


def test_a_released_holders_offered_slots_are_free_too(ledger: Ledger) -> None:
    take(ledger, 4, A)
    ledger.offer(array([4, 2]), A)
    assert ledger.release(A).tolist() == [1, 2, 3, 4]
    assert free_list(ledger) == list(range(1, SLOTS + 1))
    ledger.check()


def test_a_ledger_is_restored_from_holders_orders_and_generations(ledger: Ledger) -> None:
    take(ledger, 20, A)
    ledger.give_back(array([7, 3, 5]), A)
    holders = np.array([0, *(ledger.holder_of(slot) for slot in range(1, SLOTS + 1))], np.int32)
    orders = np.arange(SLOTS + 1, dtype=np.uint64)
    orders[[7, 3, 5]] = SLOTS + 1 + np.arange(3, dtype=np.uint64)
    restored = Ledger.restore(holders, orders, ledger.generation)
    restored.check()
    assert free_list(restored) == free_list(ledger)
    assert restored.held_by(A).tolist() == ledger.held_by(A).tolist()
    assert restored.next_order == ledger.next_order
    assert take(restored, 23, B) == take(ledger, 23, B)
    assert restored.generation.tolist() == ledger.generation.tolist()


def test_order_numbers_grow_by_one_per_freed_slot(ledger: Ledger) -> None:
    assert ledger.next_order == SLOTS + 1
    ledger.give_back(array(take(ledger, 20, A)), A)
    ledger.give_back_one(take(ledger, 1, A)[0], A)
    assert ledger.next_order == SLOTS + 22


def mixed(good: list[int], *bad: int) -> list[int]:
    """Slots that could be freed, with ones that cannot in the middle."""
    middle = len(good) // 2
    return [*good[:middle], *bad, *good[middle:]]


FAULTS = [
    pytest.param((0,), errors.ReservedSlot, (0,), "reserved", id="reserved"),
    pytest.param((SLOTS + 1,), errors.SlotOutOfRange, (SLOTS + 1,), r"1\.\.40", id="above"),
    pytest.param((-1,), errors.SlotOutOfRange, (-1,), "-1", id="negative"),
    pytest.param((2**31 - 1, -(2**31)), errors.SlotOutOfRange, (2**31 - 1, -(2**31)), "outside", id="extremes"),
    pytest.param((1,), errors.DuplicateSlot, (1,), "more than once", id="duplicate"),
    pytest.param((39, 40), errors.DoubleFree, (39, 40), "already free", id="free"),
    pytest.param((36, 35), errors.NotHolder, (36, 35), "held by 8, not by 7", id="foreign"),
]


@pytest.mark.parametrize("held", [2, SMALL_BATCH - 2, SMALL_BATCH + 2, 30])
@pytest.mark.parametrize(("bad", "kind", "named", "says"), FAULTS)
def test_a_faulty_batch_is_refused_whole_and_names_the_slots_at_fault(
    ledger: Ledger,
    held: int,
    bad: tuple[int, ...],
    kind: type[errors.InvalidSlots],
    named: tuple[int, ...],
    says: str,
) -> None:
    good = take(ledger, held, A)
    take(ledger, 34 - held, B + 1)
    take(ledger, 2, B)
    before = (free_list(ledger), ledger.generation.tolist(), ledger.next_order)
    with pytest.raises(kind, match=says) as caught:
        ledger.give_back(array(mixed(good, *bad)), A)
    assert caught.value.slots == named
    assert (free_list(ledger), ledger.generation.tolist(), ledger.next_order) == before
    assert ledger.held_by(A).tolist() == good
    ledger.check()
    ledger.give_back(array(good), A)


@pytest.mark.parametrize(
    ("slot", "kind"),
    [
        (0, errors.ReservedSlot),
        (-3, errors.SlotOutOfRange),
        (SLOTS + 1, errors.SlotOutOfRange),
        (2**63, errors.SlotOutOfRange),
        (3, errors.DoubleFree),
        (2, errors.NotHolder),
    ],
)
def test_a_single_faulty_slot_is_refused(ledger: Ledger, slot: int, kind: type[errors.InvalidSlots]) -> None:
    ledger.take_one(A)
    ledger.take_one(B)
    with pytest.raises(kind) as caught:
        ledger.give_back_one(slot, A)
    assert caught.value.slots == (slot,)
    assert [ledger.holder_of(known) for known in (1, 2, 3)] == [A, B, 0]
    ledger.check()


def test_a_refusal_lists_only_the_first_of_many_slots_in_its_text(ledger: Ledger) -> None:
    with pytest.raises(errors.DoubleFree, match="and 24 more are already free") as caught:
        ledger.give_back(array(list(range(1, SLOTS + 1))), A)
    assert caught.value.slots == tuple(range(1, SLOTS + 1))


def test_more_ids_than_there_are_slots_are_refused(ledger: Ledger) -> None:
    held = take(ledger, SLOTS, A)
    with pytest.raises(errors.DuplicateSlot) as caught:
        ledger.give_back(array([*held, *held]), A)
    assert caught.value.slots == tuple(held)
    ledger.give_back(array(held), A)


def test_read_only_ids_are_taken_as_they_come_off_the_wire(ledger: Ledger) -> None:
    for count in BATCHES:
        ids = np.frombuffer(array(take(ledger, count, A)).tobytes(), "<i4")
        assert not ids.flags.writeable
        ledger.give_back(ids, A)
    ledger.check()


def test_the_check_finds_a_slot_that_is_listed_free_and_held(ledger: Ledger) -> None:
    ledger._state_items[5] = A
    with pytest.raises(AssertionError, match="free list"):
        ledger.check()


def test_the_check_finds_a_reserved_slot_that_was_given_away(ledger: Ledger) -> None:
    ledger._state_items[0] = A
    with pytest.raises(AssertionError, match="slot 0"):
        ledger.check()


def seconds_of(work: Callable[[], None]) -> float:
    """The fastest of several runs: the others measure who else uses the machine."""

    def once() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return min(once() for _ in range(20))


@pytest.mark.parametrize("count", [1, 8, 64])
def test_a_call_costs_the_same_in_a_pool_a_thousand_times_as_large(count: int) -> None:
    def work_on(slots: int) -> Callable[[], None]:
        ledger = Ledger(slots)

        def work() -> None:
            for _ in range(50):
                taken = ledger.take(count, A)
                assert taken is not None
                ledger.give_back(taken[0], A)

        return work

    # Touching every slot once would make it a thousand times as much; caches may make it a few times.
    assert seconds_of(work_on(1_000_000)) < 20 * seconds_of(work_on(1_000))
