"""What a replay is asked to do."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from mambapool.client.replay.routing import ROUTES
from mambapool.pool.errors import ConfigError
from mambapool.pool.layout import MAX_SLOTS

#: Each is a process that imports torch.
MOST_SCHEDULERS = 256

#: A request's number has 32 bits (:mod:`~mambapool.client.replay.recurrence`).
_MOST_REQUESTS = 2**32 - 1


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What a replay is asked to do; a value that cannot be used is a :class:`ConfigError`.

    ``track``: slots per request besides the one of its state, for copies of the state. ``step_ms``: how
    far a scheduler's clock goes in one step. ``speed``: how many times faster than the trace at most, or
    None for as fast as the machine can. ``limit``: the first requests of the trace only. ``timeout``, in
    seconds, bounds every wait for an answer. ``tp_size``: each scheduler is a group of so many ranks, a process and
    a shard each. ``guarantee``: slots that are granted to each scheduler whole; 0: all share the pool.
    ``more_traces``: with ``trace`` one for each scheduler, each up to its ``limit``. ``elsewhere``: the schedulers
    are started by somebody else, and join (:mod:`~mambapool.client.replay.joining`).
    """

    trace: Path
    dir: str | os.PathLike[str] | None = None
    pool: str = "default"
    schedulers: int = 4
    track: int = 2
    step_ms: float = 30.0
    speed: float | None = None
    route: str = "rr"
    limit: int | None = None
    timeout: float = 5.0
    device: str = "cpu"
    tp_size: int = 1
    guarantee: int = 0
    more_traces: tuple[Path, ...] = ()
    elsewhere: bool = False

    def __post_init__(self) -> None:
        _check_between("schedulers", self.schedulers, 1, MOST_SCHEDULERS)
        _check_between("track", self.track, 0, MAX_SLOTS)
        _check_between("tp-size", self.tp_size, 1, MOST_SCHEDULERS)
        _check_between("guarantee", self.guarantee, 0, MAX_SLOTS)
        if self.limit is not None:
            _check_between("limit", self.limit, 1, _MOST_REQUESTS)
        _check_positive("step-ms", self.step_ms)
        _check_positive("timeout", self.timeout)
        if self.speed is not None:
            _check_positive("speed", self.speed)
        if self.more_traces and self.schedulers != len(self.traces):
            raise ConfigError(
                f"--schedulers {self.schedulers}: of {len(self.traces)} traces each has one scheduler; leave it out"
            )
        if self.route not in ROUTES:
            raise ConfigError(f"--route {self.route!r} is not one of {', '.join(ROUTES)}")

    @property
    def traces(self) -> tuple[Path, ...]:
        return (self.trace, *self.more_traces)

    @property
    def slots_per_request(self) -> int:
        return 1 + self.track


def _check_between(flag: str, value: int, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"--{flag} {value!r}: expected a whole number from {least} to {most}")


def _check_positive(flag: str, value: float) -> None:
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"--{flag} {value!r}: expected a number above 0")
