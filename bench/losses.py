"""What is faster than this project, and where. No goals: a table for the README, ``python bench/losses.py``.

A BaseManager, a list in shared memory under flock, and SGLang's allocator in process, each with one client and one
slot, and the BaseManager with 512 slots and with 16 clients too.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable

import torch
from capacity import compare
from measuring.blocks import Runs, Samples, interleave, timed
from measuring.cores import client_core, pinned, server_core
from measuring.crews import Crew
from measuring.figures import QUICK, Effort
from measuring.processes import daemon, yardstick
from measuring.swaps import hand_out_all, swapping, swapping_one
from yardsticks import flock_list, manager
from yardsticks.in_process import InProcessAllocator

from mambapool.client import connect

SLOTS = 16_384
MANY = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    effort = QUICK if parser.parse_args().quick else Effort()
    one = Runs("one client, one slot", lambda effort: one_run(1, effort), effort)
    many = Runs("one client, 512 slots", lambda effort: one_run(512, effort), effort)
    rate = statistics.median(clients_rate(3 if effort.quick else 15) for _ in range(effort.runs))
    print(f"BaseManager, one slot, × mambapool          {one.ratio('BaseManager', 'mambapool'):.2f}")
    print(f"BaseManager, 512 slots, × mambapool         {many.ratio('BaseManager', 'mambapool'):.2f}")
    print(f"mambapool's rate, {MANY} clients, × BaseManager  {rate:.2f}")
    print(f"list under flock, one slot, × mambapool     {one.ratio('flock', 'mambapool'):.3f}")
    print(f"alloc(1) + free by message, × in-process    {one.ratio('mambapool', 'in-process'):.1f}")


def one_run(count: int, effort: Effort) -> Samples:
    core = server_core("same")
    with contextlib.ExitStack() as stack:
        stack.enter_context(pinned(client_core()))
        directory = stack.enter_context(daemon(core, "--slots", str(SLOTS)))
        worker = stack.enter_context(connect(directory))
        hand_out_all(worker)
        endpoint = stack.enter_context(yardstick("manager", core, SLOTS))
        contenders = {
            "mambapool": swapping(worker, count),
            "BaseManager": timed(manager.call(endpoint, count)),
        }
        if count == 1:
            own = InProcessAllocator(4096)
            contenders["flock"] = timed(flock_list.call(SLOTS))
            contenders["in-process"] = timed(lambda: own.free(_taken(own)))
        return interleave(contenders, effort)


def clients_rate(slices: int) -> float:
    """Calls per second of many clients, to that of as many clients of a BaseManager."""
    core = server_core("same")
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(daemon(core, "--slots", str(SLOTS)))
        endpoint = stack.enter_context(yardstick("manager", core, SLOTS))

        def client() -> Callable[[], object]:
            return swapping_one(connect(directory))

        ours = stack.enter_context(Crew(MANY, client, client_core()))
        theirs = stack.enter_context(Crew(MANY, lambda: manager.call(endpoint, 1), client_core()))
        return compare(f"{MANY} clients", ours, theirs, slices)


def _taken(allocator: InProcessAllocator) -> torch.Tensor:
    slot = allocator.alloc(1)
    assert slot is not None
    return slot


if __name__ == "__main__":
    main()
