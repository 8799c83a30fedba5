"""A scheduler of the soak, run as a script: DIR PLACE PLACES SEED GUARANTEE.

Random work until a line comes on stdin, then it gives everything back and closes. Stamps the state of every slot
that it gets, and finds its own stamp there at random and before it frees the slot: a slot that two of them hold
shows as a wrong stamp. A transfer carries the giver's mark: its receiver finds that, and stamps the slot anew.

Appends one JSON line per fault to the file ``FAULTS``, and notes what was answered in ``PROGRESS``.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from soaking import Progress, sessions

from mambapool.client import Worker, connect
from mambapool.pool import slot_table as st
from mambapool.pool.errors import AllocatorUnavailable, InvalidSlots, MambaPoolError

#: Beside the runtime directory.
FAULTS, PROGRESS = "faults.jsonl", "progress"
#: A call outlasts every outage: what is not answered then was lost.
TIMEOUT_S = 30.0
#: In the stamp of a slot that is on its way to another session.
GIFT = 1 << 62


class SoakClient:
    """Holds a fifth of the pool at most; makes every call that there is."""

    def __init__(self, worker: Worker, table: st.SlotTableReader, seed: int, guarantee: int) -> None:
        self.worker = worker
        self.allocator = worker.allocator
        self.table = table
        self.guarantee = guarantee
        self.chance = random.Random(seed)
        # The same bytes as whole numbers: [layers, slots + 1, words].
        state = worker.states["temporal"]
        self.rows = state.view(torch.int64).reshape(state.shape[0], state.shape[1], -1).numpy()
        self.stamps: dict[int, int] = {}
        #: Slots on offer → their stamp and generation.
        self.offers: dict[int, tuple[int, int]] = {}
        self.grants = 0
        self.answered: Callable[[int], None] = lambda _epoch: None

    def work(self) -> None:
        """One scheduling step, and one of the rarer calls."""
        if self.chance.random() < 0.5:
            self.begin()
        for _ in range(self.chance.randint(1, 3)):
            self.take(self.ask(self.allocator.alloc, self.chance.choice((1, 1, 1, 2, 3, 8))))
        self.look(self.some(len(self.stamps)))
        self.free(self.some(len(self.stamps)))
        if self.chance.random() < 0.8:
            self.ask(self.allocator.alloc_group_end)
        self.chance.choice((self.give, self.give, self.receive, self.receive, self.wait, self.nothing))()
        if len(self.stamps) > self.table.layout.slots // 5 or self.chance.random() < 0.01:
            self.clear()
        if self.guarantee:
            self.check_local_count()
        if self.chance.random() < 0.05:
            self.compare()

    def ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """A call that nothing excuses from succeeding."""
        try:
            return call(*arguments)
        except InvalidSlots as error:  # this client holds them; the allocator says that somebody else does
            tell(doubled=error.slots, found=str(error))
            return None
        except MambaPoolError as error:
            tell(wrong=f"{type(error).__name__}: {error}")
            return None

    def begin(self) -> None:
        epoch = self.table.epoch
        self.ask(self.allocator.alloc_group_begin, self.chance.randint(1, 8), self.chance.random() < 0.5)
        if not self.guarantee:  # else it is no message
            self.answered(epoch)

    def take(self, slots: torch.Tensor | None) -> None:
        for slot in slots.tolist() if slots is not None else ():
            if slot in self.stamps:
                tell(doubled=slot, found="handed out to its own holder")
            self.offers.pop(slot, None)
            self.stamp(slot)

    def stamp(self, slot: int) -> None:
        self.grants += 1
        self.stamps[slot] = self.worker.session << 32 | self.grants
        self.rows[:, slot] = self.stamps[slot]

    def look(self, slots: list[int]) -> None:
        """Each of these still has this client's stamp, all over."""
        for slot in slots:
            self.expect(slot, self.stamps[slot])

    def expect(self, slot: int, stamp: int) -> None:
        if not (self.rows[:, slot] == stamp).all():
            found = [f"{value:#x}" for value in np.unique(self.rows[:, slot]).tolist()]
            tell(doubled=slot, found=found, stamped=f"{stamp:#x}")
            self.rows[:, slot] = stamp

    def free(self, slots: list[int]) -> None:
        self.look(slots)
        for slot in slots:
            del self.stamps[slot]
        self.ask(self.allocator.free, torch.tensor(slots))

    def clear(self) -> None:
        self.look(list(self.stamps))
        self.stamps.clear()
        if not self.guarantee:
            self.offers.clear()
        self.ask(self.allocator.clear)

    def some(self, most: int) -> list[int]:
        return self.chance.sample(sorted(self.stamps), self.chance.randint(0, most))

    def give(self) -> None:
        """Offer a few slots to somebody; those of a guarantee are nobody else's."""
        others = sorted(sessions(self.table).keys() - {self.worker.session})
        slots = self.some(min(len(self.stamps), 3))
        if not others or not slots:
            return
        kept = {slot: self.stamps.pop(slot) for slot in slots}
        for slot in slots:
            self.offers[slot] = (kept[slot], self.table.generation_of(slot))
            self.rows[:, slot] = kept[slot] | GIFT
        epoch = self.table.epoch
        try:
            self.worker.transfer(torch.tensor(slots), self.chance.choice(others))
        except InvalidSlots:  # the receiver has ended, or they are of the guarantee
            for slot in slots:
                del self.offers[slot]
                self.stamp(slot)
        except MambaPoolError as error:
            tell(wrong=f"transfer: {type(error).__name__}: {error}")
        self.answered(epoch)

    def receive(self) -> None:
        epoch = self.table.epoch
        slots = self.ask(self.worker.accept)
        self.answered(epoch)
        for slot in slots.tolist() if slots is not None else ():
            marks = np.unique(self.rows[:, slot]).tolist()
            if len(marks) != 1 or not marks[0] & GIFT or (marks[0] & ~GIFT) >> 32 == self.worker.session:
                tell(doubled=slot, found=[f"{mark:#x}" for mark in marks], stamped="by a giver")
        self.take(slots)
        self.take_back_offers()

    def take_back_offers(self) -> None:
        """Offers end with their receivers; their slots were never anybody else's."""
        table = self.table
        for slot, (stamp, generation) in list(self.offers.items()):
            # In this order: who accepts is written as the holder before the offer ends.
            offered, holder = table.offered_to(slot), table.holder_of(slot)
            if holder != self.worker.session:
                del self.offers[slot]
            elif not offered and table.generation_of(slot) == generation:
                self.expect(slot, stamp | GIFT)
                del self.offers[slot]
                self.stamp(slot)

    def wait(self) -> None:
        """An alloc that may wait; without an allocator for longer than that it is told so."""
        try:
            self.take(self.allocator.alloc(self.chance.randint(1, 8), timeout=self.chance.random() * 0.05))
        except AllocatorUnavailable:
            pass

    def compare(self) -> None:
        """When all is applied, allocator and client say the same of who holds what; what only one knows is lost."""
        self.ask(self.allocator.alloc_group_end)
        self.ask(self.worker._transport.settle)
        table, mine = self.table, self.worker.session
        held = {
            slot
            for slot in range(1, table.layout.slots + 1)
            if table.holder_of(slot) == mine and not table.offered_to(slot) and table.request_of(slot) != 1
        }
        known = {slot for slot in self.allocator.held() if table.request_of(slot) != 1}
        if wrong := (held ^ known) - self.offers.keys():
            tell(
                wrong=f"slots {sorted(wrong)}: the allocator has {sorted(held)} as held, the client {sorted(known)}"
            )

    def nothing(self) -> None:
        pass

    def check_local_count(self) -> None:
        """A guarantee's count is local and exact; slots that came by a transfer are on top of it."""
        words = self.table.words[self.table.layout.field(st.REQUEST) :]
        in_use = sum(1 for slot in self.stamps if words[slot] == 1)
        available = self.allocator.available_size() + len(self.allocator._window)
        if available != self.guarantee - in_use:
            tell(wrong=f"{available} of the guarantee are free, {in_use} in use")


def tell(**fault: Any) -> None:
    """One write, so that a kill cuts no line in two."""
    os.write(_faults, (json.dumps(fault) + "\n").encode())


def main(directory: Path, place: int, places: int, seed: int, guarantee: int) -> None:
    progress = Progress(directory.with_name(PROGRESS), places)
    with connect(directory, name=f"soak-{place}", guarantee=guarantee, timeout=TIMEOUT_S) as worker:
        table = st.SlotTableReader(directory / "default.table")
        client = SoakClient(worker, table, seed, guarantee)
        client.answered = lambda epoch: progress.answered(place, worker.session, epoch)
        while not select.select([0], [], [], 0)[0]:
            client.work()
        client.ask(client.allocator.alloc_group_end)
        client.take_back_offers()
        client.free(sorted(client.stamps))


if __name__ == "__main__":
    _faults = os.open(Path(sys.argv[1]).with_name(FAULTS), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    os._exit(0)  # eight interpreters with torch that end in order take seconds
