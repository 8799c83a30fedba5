"""What one scheduler of a replay found out, and how it travels from process to process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from mambapool.client.replay.usage import HeldTimeline


@dataclass(frozen=True, slots=True)
class SchedulerResult:
    """What one scheduler found out.

    ``mismatches`` counts requests with a slot that was not what it must be, and refused calls; ``findings``
    are the first lines about them. ``alloc_us`` has one entry per call for slots that sent a message. ``waiting``
    counts the requests that have arrived and wait for slots, over time. ``most_in_use``: so many slots of the pool, by
    all of its users, were not free when it had just taken some.
    """

    finished: int
    mismatches: int
    findings: list[str]
    steps: int
    messages: int
    waits: int
    alloc_us: list[float]
    held: HeldTimeline
    waiting: HeldTimeline = field(default_factory=HeldTimeline)
    most_in_use: int = 0

    def to_json(self) -> dict[str, Any]:
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {**fields, "held": self.held.to_json(), "waiting": self.waiting.to_json()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SchedulerResult:
        timelines = {name: HeldTimeline.from_json(value[name]) for name in ("held", "waiting")}
        return cls(**{**value, **timelines})
