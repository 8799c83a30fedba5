"""Random histories of the bare ledger against a model of lists and maps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as draw
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from slot_model import FAULTS, MAX_SESSIONS, Model, Offered, Pick, counts, picks, pool_sizes, some, steps_of, who

from mambapool.pool import protocol
from mambapool.pool.errors import InvalidSlots
from mambapool.service.ledger import Ids, Ledger


def array(slots: list[int] | tuple[int, ...]) -> Ids:
    return np.array(slots, np.int32)


class LedgerHistory(RuleBasedStateMachine):
    """The ledger alone."""

    steps = 0

    @initialize(slots=pool_sizes)
    def start(self, slots: int) -> None:
        self.model = Model(slots)
        self.ledger = Ledger(slots)

    @rule(count=counts, holder=who)
    def take(self, count: int, holder: int) -> None:
        expected = self.model.take(count, holder + 1)
        taken = self.ledger.take(count, holder + 1)
        assert (taken and taken[0].tolist()) == expected
        if taken:
            assert taken[1].tolist() == [self.model.generation[slot] for slot in taken[0]]

    @rule(holder=who)
    def take_one(self, holder: int) -> None:
        expected = self.model.take(1, holder + 1)
        assert self.ledger.take_one(holder + 1) == (expected[0] if expected else 0)

    @rule(holder=who, pick=picks)
    def give_back(self, holder: int, pick: Pick) -> None:
        slots = some(self.model.own(holder + 1), pick)
        self.model.give_back(slots)
        if len(slots) == 1:
            self.ledger.give_back_one(slots[0], holder + 1)
        else:
            self.ledger.give_back(array(slots), holder + 1)

    @rule(holder=who, pick=picks, to=who)
    def offer(self, holder: int, pick: Pick, to: int) -> None:
        slots = some(self.model.own(holder + 1), pick)
        if slots:
            self.model.offers.append(Offered(holder + 1, to + 1, tuple(slots)))
            self.ledger.offer(array(slots), holder + 1)

    @rule(which=who, accepted=draw.booleans())
    def end_of_an_offer(self, which: int, accepted: bool) -> None:
        if not self.model.offers:
            return
        offer = self.model.offers[which % len(self.model.offers)]
        if accepted:
            self.ledger.hand_over(array(self.model.accept(offer)), offer.receiver)
        else:
            self.model.offers.remove(offer)
            self.ledger.withdraw(array(offer.slots), offer.giver)

    @rule(holder=who, pick=picks, fault=draw.sampled_from(list(FAULTS)), offering=draw.booleans())
    def misuse(self, holder: int, pick: Pick, fault: str, offering: bool) -> None:
        batch = self.model.spoiled(fault, some(self.model.own(holder + 1), pick), holder + 1)
        if batch is None:
            return
        call = self.ledger.offer if offering else self.ledger.give_back
        with pytest.raises(InvalidSlots) as caught:
            call(array(batch[0]), holder + 1)
        assert protocol.error_payload(caught.value)[0] == FAULTS[fault]
        assert list(caught.value.slots) == batch[1]

    @rule(holder=who)
    def release(self, holder: int) -> None:
        assert self.ledger.release(holder + 1).tolist() == self.model.release(holder + 1)

    @invariant()
    def the_ledger_is_as_the_model(self) -> None:
        LedgerHistory.steps += 1
        self.ledger.check()
        assert self.ledger.free_slots().tolist() == self.model.free
        assert self.ledger.generation.tolist() == self.model.generation
        for holder in range(1, MAX_SESSIONS + 1):
            assert self.ledger.held_by(holder).tolist() == self.model.held_by(holder)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            for holder in range(1, MAX_SESSIONS + 1):
                self.ledger.release(holder)
            assert self.ledger.free_slots().tolist() == list(range(1, self.model.slots + 1))


def test_the_ledger_does_what_a_list_would_do() -> None:
    steps_of(LedgerHistory, histories=60, steps=100)
    assert LedgerHistory.steps >= 5_000
