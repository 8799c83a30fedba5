"""A worker in a container, run as ``python3 -c``: does what a line of stdin says, and answers with a line of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from mambapool.client import Worker, connect, errors


class Asked:
    """The words that a line may begin with are its methods."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._held = torch.empty(0, dtype=torch.int64)

    def alloc(self, count: str, timeout: str = "0") -> list[int] | None:
        slots = self._worker.allocator.alloc(int(count), timeout=float(timeout) or None)
        if slots is not None:
            self._held = torch.cat((self._held, slots))
        return None if slots is None else slots.tolist()

    def free(self) -> int:
        self._worker.allocator.free(self._held)
        self._held = self._held[:0]
        return self._worker.allocator.available_size()

    def write(self, value: str, *slots: str) -> None:
        """Into those slots, or all that are held."""
        where = torch.tensor([int(slot) for slot in slots]) if slots else self._held
        for states in self._worker.states.values():
            states[:, where] = float(value)

    def read(self, *slots: str) -> list[float]:
        """The values in those slots, each once."""
        where = torch.tensor([int(slot) for slot in slots])
        return sorted({v for states in self._worker.states.values() for v in states[:, where].flatten().tolist()})

    def work(self, seconds: str, most: str = "inf") -> dict[str, float]:
        """Steps of an engine for so long, or until so many are done: how many, and how long the slowest took."""
        steps, slowest_s, until = 0, 0.0, time.monotonic() + float(seconds)
        while (began := time.monotonic()) < until and steps < float(most):
            self._worker.allocator.alloc_group_begin(2)
            slot = self._worker.allocator.alloc(1)
            assert slot is not None, "there is room"
            self._worker.states["temporal"][:, slot] = steps % 100
            assert bool((self._worker.states["temporal"][:, slot] == steps % 100).all())
            self._worker.allocator.free(slot)
            self._worker.allocator.alloc_group_end()
            steps += 1
            slowest_s = max(slowest_s, time.monotonic() - began)
        return {"steps": steps, "slowest_s": slowest_s}

    def leave(self) -> None:
        self._worker.close()
        os._exit(0)


def say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(name: str, timeout: str, rank: str = "0", world_size: str = "1") -> int:
    """With a world size one rank of the group of that name."""
    torch.set_num_threads(1)
    group = name if int(world_size) > 1 else None
    label = f"{name}-{rank}" if group else name
    try:
        worker = connect(
            name=label, timeout=float(timeout), group=group, rank=int(rank), world_size=int(world_size)
        )
    except errors.MambaPoolError as error:
        say({type(error).__name__: str(error)})
        return 1
    asked = Asked(worker)
    say({"session": worker.session, "pid": os.getpid()})
    for line in sys.stdin:
        word, *arguments = line.split()
        answer: Any
        try:
            answer = getattr(asked, word)(*arguments)
        except errors.MambaPoolError as error:
            answer = {type(error).__name__: str(error)}
        say(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
