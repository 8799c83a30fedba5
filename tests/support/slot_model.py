"""What a pool's slots do, in lists and dictionaries: the model that random histories are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as draw
from hypothesis.stateful import RuleBasedStateMachine
from hypothesis.stateful import run_state_machine_as_test as run_histories

from mambapool.pool import protocol

MAX_SESSIONS = 4

#: Sizes at which the list wraps around often, and batches of both kinds fit.
pool_sizes = draw.sampled_from([1, 2, 17, 40, 60])
counts = draw.sampled_from([1, 1, 2, 3, 8, 16, 17, 25, 61])
who = draw.integers(0, MAX_SESSIONS - 1)

#: Which of some slots: from where on, every how many, how many at most, in which direction.
Pick = tuple[int, int, int, bool]
picks = draw.tuples(
    draw.integers(0, 9),
    draw.sampled_from([1, 1, 1, 2, 3]),
    draw.sampled_from([1, 2, 5, 17, 60, 60]),
    draw.booleans(),
)
#: … or none at all, half of the time.
maybe_picks = draw.one_of(draw.none(), picks)

FAULTS = {
    "reserved": protocol.RESERVED_SLOT,
    "out of range": protocol.SLOT_OUT_OF_RANGE,
    "duplicate": protocol.DUPLICATE_SLOT,
    "free": protocol.DOUBLE_FREE,
    "foreign": protocol.NOT_HOLDER,
    "offered": protocol.NOT_HOLDER,
}


def some(slots: list[int], pick: Pick) -> list[int]:
    """The slots that ``pick`` means."""
    start, stride, most, backwards = pick
    if not slots:
        return []
    chosen = slots[start % len(slots) :: stride][:most]
    return chosen[::-1] if backwards else chosen


@dataclass(frozen=True)
class Offered:
    """Slots on their way from one holder to another one."""

    giver: int
    receiver: int
    slots: tuple[int, ...]
    request: int = 0


@dataclass
class Model:
    """Slots are taken from the head of a list and given back at its tail; offered ones stay the giver's."""

    slots: int
    free: list[int] = field(default_factory=list)
    holder: dict[int, int] = field(default_factory=dict)
    request: dict[int, int] = field(default_factory=dict)
    generation: list[int] = field(default_factory=list)
    offers: list[Offered] = field(default_factory=list)
    #: Numbers the frees, per slot.
    order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.slots + 1))
        self.generation = [0] * (self.slots + 1)
        self.order = list(range(self.slots + 1))

    @property
    def offered(self) -> dict[int, int]:
        """Slot → who may accept it."""
        return {slot: offer.receiver for offer in self.offers for slot in offer.slots}

    def held_by(self, holder: int) -> list[int]:
        return sorted(slot for slot, of in self.holder.items() if of == holder)

    def own(self, holder: int) -> list[int]:
        """What a holder can free."""
        return [slot for slot in self.held_by(holder) if slot not in self.offered]

    def take(self, count: int, holder: int, request: int = 0) -> list[int] | None:
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        for slot in taken:
            self.holder[slot] = holder
            self.request[slot] = request
            self.generation[slot] += 1
        return taken

    def give_back(self, slots: list[int]) -> None:
        for slot in slots:
            del self.holder[slot]
        self._append(slots)

    def release(self, holder: int) -> list[int]:
        """Free all of a holder, its offers included."""
        slots = self.held_by(holder)
        self.offers = [offer for offer in self.offers if offer.giver != holder]
        self.give_back(slots)
        if not self.holder:
            self.free = []
            self._append(range(1, self.slots + 1))
        return slots

    def end(self, holder: int) -> list[int]:
        """Like :meth:`release`, of one that takes no offers any more either."""
        self.offers = [offer for offer in self.offers if offer.receiver != holder]
        return self.release(holder)

    def accept(self, offer: Offered, request: int = 0) -> list[int]:
        """Its slots, now the receiver's, in the order in which they were freed last."""
        self.offers.remove(offer)
        slots = sorted(offer.slots, key=self.order.__getitem__)
        for slot in slots:
            self.holder[slot] = offer.receiver
            self.request[slot] = request
        return slots

    def spoiled(self, fault: str, good: list[int], holder: int) -> tuple[list[int], list[int]] | None:
        """A batch with that fault among ``good`` slots, and the slots at fault; None if there can be none."""
        bad = {
            "reserved": [0],
            "out of range": [self.slots + 1],
            "duplicate": good[:1],
            "free": self.free[-2:],
            "foreign": [slot for slot, of in self.holder.items() if of != holder][:2],
            "offered": [slot for slot in self.offered if self.holder[slot] == holder][:2],
        }[fault]
        middle = len(good) // 2
        return ([*good[:middle], *bad, *good[middle:]], bad) if bad else None

    def _append(self, slots: list[int] | range) -> None:
        self.free += slots
        for place, slot in enumerate(slots, max(self.order) + 1):
            self.order[slot] = place


def steps_of(machine: type[RuleBasedStateMachine], histories: int, steps: int) -> None:
    """Run that many histories of so many steps; the same ones each time."""
    run_histories(
        machine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
