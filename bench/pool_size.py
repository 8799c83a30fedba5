"""Goal 9: what a million slots cost more than a thousand.

``alloc(1)`` with a free, from a pool that is all free; and a window of 64 from a pool of which 1,024 random slots are
free, warm: their tensors are made.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from measuring.blocks import Contender, Runs, Samples, interleave
from measuring.cores import client_core, pinned, server_core
from measuring.figures import Effort, Figure, run_script
from measuring.processes import daemon
from measuring.swaps import swapping

from mambapool.client import Worker, connect

SMALL, LARGE = 2**10, 2**20
COUNT = 64
LIMIT = 1.3


def measure(effort: Effort) -> list[Figure]:
    runs = Runs("cost against pool size", one_run, effort)
    return [
        Figure(9, f"{what}, 1M / 1K slots", runs.ratio(f"{what}, {LARGE} slots", f"{what}, {SMALL} slots"), LIMIT)
        for what in ("alloc(1) with a free", f"group of {COUNT}")
    ]


def one_run(effort: Effort) -> Samples:
    with swaps((SMALL, LARGE)) as contenders:
        return interleave(contenders, effort)


@contextlib.contextmanager
def swaps(sizes: Sequence[int]) -> Iterator[dict[str, Contender]]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(pinned(client_core()))
        directory = stack.enter_context(daemon(server_core("same")))
        contenders = {}
        for size in sizes:
            free = stack.enter_context(attached(directory, f"free-{size}", size))
            contenders[f"alloc(1) with a free, {size} slots"] = swapping(free, 1)
            used = stack.enter_context(attached(directory, f"used-{size}", size))
            use_all_but(SMALL, used)
            contenders[f"group of {COUNT}, {size} slots"] = swapping(used, COUNT)
        yield contenders


def attached(directory: Path, pool: str, size: int) -> Worker:
    return connect(directory, pool=pool, create_slots=size)


def use_all_but(count: int, worker: Worker) -> None:
    """Random slots are free, in random order, and each has been handed out once more."""
    allocator = worker.allocator
    size = allocator.size
    slots = allocator.alloc(size)
    assert slots is not None
    chosen = random.Random(size).sample(range(size), count)
    allocator.free(slots[torch.tensor(chosen)])
    for _ in range(count // COUNT):
        allocator.alloc_group_begin(COUNT)
    allocator.alloc_group_end()


if __name__ == "__main__":
    run_script(measure, __doc__)
