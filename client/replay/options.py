"""What a replay is asked to do."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from mambapool.client.replay.routing import ROUTES
from mambapool.pool.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What a replay is asked to do; a value that cannot be used is a :class:`ConfigError`.

    ``track``: slots per request besides the one of its state, for copies of the state. ``step_ms``: how
    far a scheduler's clock goes in one step. ``speed``: how many times faster than the trace at most, or
    None for as fast as the machine can. ``limit``: the first requests of the trace only. ``timeout``, in
    seconds, bounds every wait for an answer. ``elsewhere``: the schedulers are started by somebody else, and
    join (:mod:`~mambapool.client.replay.joining`).
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
    elsewhere: bool = False

    def __post_init__(self) -> None:
        _check_at_least("schedulers", self.schedulers, 1)
        _check_at_least("track", self.track, 0)
        if self.limit is not None:
            _check_at_least("limit", self.limit, 1)
        _check_positive("step-ms", self.step_ms)
        _check_positive("timeout", self.timeout)
        if self.speed is not None:
            _check_positive("speed", self.speed)
        if self.route not in ROUTES:
            raise ConfigError(f"--route {self.route!r} is not one of {', '.join(ROUTES)}")

    @property
    def slots_per_request(self) -> int:
        return 1 + self.track


def _check_at_least(flag: str, value: int, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"--{flag} {value!r}: expected a whole number of at least {least}")


def _check_positive(flag: str, value: float) -> None:
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"--{flag} {value!r}: expected a number above 0")
