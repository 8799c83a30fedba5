"""Goal 5: ``alloc(1)`` inside a window and under a guarantee against SGLang's own ``alloc(1)`` inside a group.

No message on either side. Timed per window of 64: beginning it, and giving its slots back, is not part of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from measuring.blocks import Contender, Runs, Samples, interleave, timed
from measuring.cores import client_core, pinned, server_core
from measuring.figures import Effort, Figure, run_script
from measuring.processes import daemon
from measuring.swaps import hand_out_all
from yardsticks.in_process import InProcessAllocator

from mambapool.client import connect

SLOTS = 1024
COUNT = 64
LIMIT = 1.5


def measure(effort: Effort) -> list[Figure]:
    runs = Runs(f"{COUNT} × alloc(1)", one_run, effort)
    return [
        Figure(5, f"alloc(1) {where}, × SGLang's", runs.ratio(where, "in-process"), LIMIT)
        for where in ("inside a window", "under a guarantee")
    ]


def one_run(effort: Effort) -> Samples:
    with contextlib.ExitStack() as stack:
        stack.enter_context(pinned(client_core()))
        directory = stack.enter_context(daemon(server_core("same"), "--slots", str(2 * SLOTS)))
        in_common = stack.enter_context(connect(directory))
        guaranteed = stack.enter_context(connect(directory, guarantee=SLOTS))
        hand_out_all(in_common)
        contenders = {
            "inside a window": in_windows(in_common.allocator),
            "under a guarantee": without_windows(guaranteed.allocator),
            "in-process": in_windows(InProcessAllocator(SLOTS)),
        }
        return interleave(contenders, effort)


def in_windows(allocator: Any) -> Contender:
    """The window before is given back, and one begun, before each timing."""
    slots: list[torch.Tensor] = []

    def before() -> None:
        if slots:
            allocator.free(torch.cat(slots))
            allocator.alloc_group_end()
        allocator.alloc_group_begin(COUNT)

    return timed(draining(allocator, slots), before)


def without_windows(allocator: Any) -> Contender:
    slots: list[torch.Tensor] = []

    def before() -> None:
        if slots:
            allocator.free(torch.cat(slots))

    return timed(draining(allocator, slots), before)


def draining(allocator: Any, slots: list[torch.Tensor]) -> Callable[[], object]:
    """``COUNT`` calls, whose slots are then in ``slots``."""
    alloc = allocator.alloc

    def call() -> None:
        slots[:] = [alloc(1) for _ in range(COUNT)]

    return call


if __name__ == "__main__":
    run_script(measure, __doc__)
