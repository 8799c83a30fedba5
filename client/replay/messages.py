"""What a replay and its scheduler processes say to each other: one JSON object per line, on pipes or a socket.

To a process, on its standard input: a :class:`Job`, then a :class:`Go` when all are ready. One that is a rank of
several first says :class:`Loaded`, and is sent a :class:`Go` when all are: ranks join each other, and wait for
nobody who still imports torch. From it, on its standard output: :class:`Ready`, any number of
:class:`Progress`, and at the end one :class:`~mambapool.client.replay.result.SchedulerResult`; or
:class:`Failed` at any time.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mambapool.client.replay.options import ReplayOptions
from mambapool.client.replay.result import SchedulerResult


@dataclass(frozen=True, slots=True)
class Job:
    """Which share of which replay a scheduler runs; ``scheduler`` counts from 0, and so does ``rank`` of its group."""

    scheduler: int
    options: ReplayOptions
    rank: int = 0
    group: str | None = None

    @property
    def place(self) -> str:
        return f"scheduler {self.scheduler}" + (f", rank {self.rank}" if self.options.tp_size > 1 else "")

    def to_line(self) -> bytes:
        options = dataclasses.asdict(self.options)
        paths: dict[str, Any] = {key: str(value) for key, value in options.items() if isinstance(value, Path)}
        paths["more_traces"] = [str(path) for path in self.options.more_traces]
        fields = {"scheduler": self.scheduler, "rank": self.rank, "group": self.group}
        return _line({**fields, "options": {**options, **paths}})

    @classmethod
    def from_line(cls, line: bytes) -> Job:
        fields = json.loads(line)
        options = fields["options"]
        paths = {"trace": Path(options["trace"]), "more_traces": tuple(map(Path, options["more_traces"]))}
        read = ReplayOptions(**{**options, **paths})
        return cls(fields["scheduler"], read, fields["rank"], fields["group"])


@dataclass(frozen=True, slots=True)
class Go:
    """All are ready: the trace starts at ``origin_s`` on the clock of :func:`time.monotonic`."""

    origin_s: float

    def to_line(self) -> bytes:
        return _line({"origin_s": self.origin_s})

    @classmethod
    def from_line(cls, line: bytes) -> Go:
        return cls(json.loads(line)["origin_s"])


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything is imported."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Connected to a pool of ``slots`` slots, whose states consist of ``tensors`` tensors."""

    slots: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How many requests are finished, how many steps were computed; ``blocked``: nothing runs, and what
    waits gets no slots."""

    finished: int
    steps: int
    blocked: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The scheduler ends because of an error of :mod:`mambapool.pool.errors`, by its class's name."""

    error: str
    text: str


Report = Loaded | Ready | Progress | Failed | SchedulerResult


def report_line(report: Report) -> bytes:
    if isinstance(report, SchedulerResult):
        return _line({"SchedulerResult": report.to_json()})
    return _line({type(report).__name__: dataclasses.asdict(report)})


def parse_report(line: bytes) -> Report:
    ((kind, fields),) = json.loads(line).items()
    if kind == "SchedulerResult":
        return SchedulerResult.from_json(fields)
    return _REPORTS[kind](**fields)


_REPORTS: dict[str, type[Loaded] | type[Ready] | type[Progress] | type[Failed]] = {
    "Loaded": Loaded,
    "Ready": Ready,
    "Progress": Progress,
    "Failed": Failed,
}


class Reports:
    """The reports that come through a descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._unread = b""

    def read(self) -> list[Report] | None:
        """Those that have come, when something has; None when the process has said its last."""
        piece = os.read(self._fd, 1 << 16)
        if not piece:
            return None
        *lines, self._unread = (self._unread + piece).split(b"\n")
        return [parse_report(line) for line in lines]


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
