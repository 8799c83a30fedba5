"""What one scheduler of a replay found out, and how it travels from process to process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mambapool.client.replay.usage import HeldTimeline


@dataclass(frozen=True, slots=True)
class SchedulerResult:
    """What one scheduler found out.

    ``mismatches`` counts requests with a slot that was not what it must be, and refused calls; ``findings``
    are the first lines about them. ``alloc_us`` has one entry per call for slots that sent a message.
    """

    finished: int
    mismatches: int
    findings: list[str]
    steps: int
    messages: int
    waits: int
    alloc_us: list[float]
    held: HeldTimeline

    def to_json(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "held": [self.held.changes, self.held.end_ms]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SchedulerResult:
        changes, end_ms = value["held"]
        held = HeldTimeline([(clock_ms, slots) for clock_ms, slots in changes], end_ms)
        return cls(**{**value, "held": held})
