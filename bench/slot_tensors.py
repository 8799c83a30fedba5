"""Goal 6: turning a group's ids, as they come from the wire, into one tensor per slot, against ``split(1)``.

Warm: each slot has been handed out before, so that its tensor is there.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
from measuring.blocks import Runs, Samples, interleave, timed
from measuring.cores import client_core, pinned
from measuring.figures import Effort, Figure, run_script

from mambapool.client.slot_tensors import SlotTensors
from mambapool.pool import protocol

SLOTS = 4096
COUNTS = (64, 512)
LIMIT = 0.2


def measure(effort: Effort) -> list[Figure]:
    runs = Runs("ids into slot tensors", one_run, effort)
    ratios = {count: runs.ratio(f"ours {count}", f"split {count}") for count in COUNTS}
    return [
        Figure(6, f"slot tensors of a group of {count}, × split(1)", ratio, LIMIT)
        for count, ratio in ratios.items()
    ]


def one_run(effort: Effort) -> Samples:
    contenders = {}
    for count in COUNTS:
        ids = random.Random(count).sample(range(1, SLOTS + 1), count)
        contenders[f"ours {count}"] = timed(from_the_wire(ids))
        tensor = torch.tensor(ids)
        contenders[f"split {count}"] = timed(lambda tensor=tensor: tensor.split(1))  # type: ignore[misc]
    with pinned(client_core()):
        return interleave(contenders, effort)


def from_the_wire(ids: list[int]) -> Callable[[], object]:
    """What ``alloc_group_begin`` does with a reply."""
    body = protocol.pack_ids(np.array(ids, np.int32))
    tensors = SlotTensors(SLOTS, torch.device("cpu"))
    tensors.make(range(1, SLOTS + 1))

    def call() -> None:
        slots = protocol.unpack_ids(body).tolist()
        tensors.make(slots)
        slots.reverse()

    return call


if __name__ == "__main__":
    run_script(measure, __doc__)
