"""A scheduler at random work, run as a script: DIR NUMBER ROUNDS.

Stamps the state of every slot that it gets, and finds its own stamp there before it frees the slot. Says which
slots it holds at the end, waits for a line, and closes.
"""

from __future__ import annotations

import json
import random
import sys

import torch

from mambapool.client import connect
from mambapool.client.allocator import SlotAllocator


class StampingWorker:
    """Holds up to a quarter of the pool; makes every call that there is."""

    def __init__(self, allocator: SlotAllocator, rows: torch.Tensor, number: int) -> None:
        self.allocator = allocator
        self.rows = rows  # [layers, slots + 1, …] of float32, which holds these stamps exactly
        self.number = number
        self.chance = random.Random(number)
        self.stamps: dict[int, int] = {}
        self.grants = 0
        self.exhausted = 0

    def work(self) -> None:
        if self.chance.random() < 0.5:
            self.allocator.alloc_group_begin(self.chance.randint(1, 8), partial=self.chance.random() < 0.5)
        for _ in range(self.chance.randint(1, 4)):
            self.take(self.allocator.alloc(self.chance.choice((1, 1, 1, 2, 5))))
        self.free(self.chance.randint(0, len(self.stamps)))
        if self.chance.random() < 0.8:
            self.allocator.alloc_group_end()
        if len(self.stamps) > self.allocator.size // 4 or self.chance.random() < 0.01:
            self.clear()

    def take(self, slots: torch.Tensor | None) -> None:
        if slots is None:
            self.exhausted += 1
            return
        for slot in slots.tolist():
            assert slot not in self.stamps, f"slot {slot} is mine already"
            self.grants += 1
            self.stamps[slot] = self.number * 1_000_000 + self.grants
            self.rows[:, slot] = self.stamps[slot]

    def free(self, count: int) -> None:
        slots = self.chance.sample(sorted(self.stamps), count)
        self.look(slots)
        for slot in slots:
            del self.stamps[slot]
        self.allocator.free(torch.tensor(slots))

    def clear(self) -> None:
        self.look(list(self.stamps))
        self.stamps.clear()
        self.allocator.clear()

    def look(self, slots: list[int]) -> None:
        for slot in slots:
            found = set(self.rows[:, slot].flatten().tolist())
            assert found == {self.stamps[slot]}, f"slot {slot}: {found}, stamped with {self.stamps[slot]}"


def main(directory: str, number: int, rounds: int) -> None:
    with connect(directory, name=f"stamping-{number}") as worker:
        stamping = StampingWorker(worker.allocator, worker.states["temporal"], number)
        for _ in range(rounds):
            stamping.work()
        worker.allocator.alloc_group_end()
        stamping.look(list(stamping.stamps))
        _ = worker.allocator.free_slots  # waits until all that was posted is applied
        said: dict[str, object] = {"session": worker.session, "held": sorted(stamping.stamps)}
        said |= {"grants": stamping.grants, "exhausted": stamping.exhausted}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
