"""Comparing slots of the pool with what a request must find in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mambapool.client.replay.findings import Findings
from mambapool.client.replay.mapped_states import MappedStates
from mambapool.client.replay.mismatch import describe, first_difference
from mambapool.client.replay.private_states import SlotWords


@dataclass(frozen=True, slots=True)
class Check:
    """A slot in which a request keeps what ``holds`` says, and what it must be."""

    request: int
    step: int
    slot: int
    holds: str
    expected: SlotWords


def verify(mapped: MappedStates, checks: Sequence[Check], findings: Findings) -> None:
    """Read all the slots at once, and report the first difference of each that differs."""
    read = mapped.read(np.array([check.slot for check in checks]))
    for check, *found in zip(checks, *read, strict=True):
        difference = first_difference(mapped.tensors, found, check.expected)
        if difference is not None:
            line = describe(check.request, check.slot, check.holds, check.step, difference)
            findings.spoiled(check.request, line)
