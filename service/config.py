"""What ``serve`` and ``allocator`` are told, as frozen values. Defaults are written here, once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mambapool.pool.errors import ConfigError
from mambapool.pool.layout import DEVICES, MAX_TP_SIZE, Geometry, check_slots
from mambapool.pool.runtime_dir import check_pool_name

DEFAULT_POOL = "default"


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """One pool. Without a geometry it is allocator-only: the engine keeps its own tensors."""

    name: str
    slots: int
    geometry: Geometry | None = None
    tp_size: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_pool_name(self.name)
        check_slots(self.slots)
        if self.device not in DEVICES:
            raise ConfigError(f"device {self.device!r}: expected {' or '.join(DEVICES)}")
        if type(self.tp_size) is not int or not 1 <= self.tp_size <= MAX_TP_SIZE:
            raise ConfigError(f"tp_size {self.tp_size!r}: expected a whole number from 1 to {MAX_TP_SIZE}")
        if self.geometry is None and self.device != "cpu":
            raise ConfigError(
                f"pool {self.name}: --device {self.device} needs --model or --state: without, it has no memory"
            )
        if self.geometry is None and self.tp_size != 1:
            raise ConfigError(
                f"pool {self.name}: --tp-size needs --model or --state, which say what a shard holds"
            )

    @property
    def shards(self) -> int:
        return self.tp_size if self.geometry else 0

    def to_wire(self) -> dict[str, Any]:
        geometry = self.geometry.to_wire() if self.geometry else None
        return {
            "name": self.name,
            "slots": self.slots,
            "geometry": geometry,
            "tp_size": self.tp_size,
            "device": self.device,
        }

    @classmethod
    def from_wire(cls, value: dict[str, Any]) -> Self:
        geometry = value["geometry"]
        return cls(
            value["name"],
            value["slots"],
            Geometry.from_wire(geometry) if geometry else None,
            value["tp_size"],
            value["device"],
        )


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """One allocator process. ``parent_pid`` is the process that it ends with; None: it stands alone."""

    dir: Path
    pools: tuple[PoolConfig, ...] = ()
    max_sessions: int = 1024
    max_waiters: int = 1024
    #: How long at least the slots of a dead process are kept back, if they are on a GPU.
    quarantine_s: float = 1.0
    parent_pid: int | None = None
    #: The keepers were started with this allocator: a slot table of memory before theirs is of no use.
    fresh: bool = False
    #: The pool whose keepers have to be there first, and for how long they are waited for.
    wait_for: str | None = None
    wait_s: float = 30.0
    #: End when there has been no session for so long, once there was one.
    exit_idle_s: float | None = None

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"pool {name} is configured twice")
        if not 1 <= self.max_sessions <= 65536:
            raise ConfigError(f"max_sessions {self.max_sessions}: expected 1 to 65536")
        if not 0 <= self.max_waiters <= 65536:
            raise ConfigError(f"max_waiters {self.max_waiters}: expected 0 to 65536")

    def to_json(self) -> str:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({**fields, "dir": str(self.dir), "pools": [pool.to_wire() for pool in self.pools]})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of :meth:`to_json`; anything else is a :class:`ConfigError`."""
        try:
            value = json.loads(text)
            pools = tuple(PoolConfig.from_wire(pool) for pool in value.pop("pools"))
            return cls(Path(value.pop("dir")), pools, **value)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not the configuration of an allocator: {error}") from error
