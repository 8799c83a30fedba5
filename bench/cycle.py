"""Goal 7: a whole cycle against SGLang's in-process allocator: begin(B), B × alloc(1), B × free, end.

Ours costs a message and a posted one, to another process that knows who has what; theirs copies its list at each free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from measuring.blocks import Contender, Runs, Samples, interleave, timed
from measuring.cores import client_core, pinned, server_core
from measuring.figures import Effort, Figure, run_script
from measuring.processes import daemon
from measuring.swaps import hand_out_all
from yardsticks.in_process import InProcessAllocator

from mambapool.client import connect

SIZES = (1024, 4096)
LIMITS = {64: 0.8, 512: 0.4}


def measure(effort: Effort) -> list[Figure]:
    runs = Runs("begin(B), B × alloc(1), B × free, end", one_run, effort)
    return [
        Figure(
            7,
            f"cycle of {count} at {size} slots, × in-process",
            runs.ratio(title("mambapool", count, size), title("in-process", count, size)),
            limit,
        )
        for count, limit in LIMITS.items()
        for size in SIZES
    ]


def one_run(effort: Effort) -> Samples:
    # A cycle is as long as a block of others' calls.
    short = replace(effort, blocks=effort.blocks // 3, calls=5)
    with cycles(SIZES, tuple(LIMITS)) as contenders:
        return interleave(contenders, short)


@contextlib.contextmanager
def cycles(sizes: Sequence[int], counts: Sequence[int]) -> Iterator[dict[str, Contender]]:
    """A contender of each side for every pool size and group size."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(pinned(client_core()))
        directory = stack.enter_context(daemon(server_core("same")))
        contenders = {}
        for size in sizes:
            worker = stack.enter_context(connect(directory, pool=f"slots-{size}", create_slots=size))
            hand_out_all(worker)
            own = InProcessAllocator(size)
            for count in counts:
                contenders[title("mambapool", count, size)] = timed(cycle(worker.allocator, count))
                contenders[title("in-process", count, size)] = timed(cycle(own, count))
        yield contenders


def cycle(allocator: Any, count: int) -> Callable[[], object]:
    def call() -> None:
        allocator.alloc_group_begin(count)
        for slot in [allocator.alloc(1) for _ in range(count)]:
            allocator.free(slot)
        allocator.alloc_group_end()

    return call


def title(whose: str, count: int, size: int) -> str:
    return f"{whose}, B={count}, {size} slots"


if __name__ == "__main__":
    run_script(measure, __doc__)
