"""``serve --config FILE.toml``: several pools, with the flags' names as keys.

::

    max-sessions = 1024

    [[pool]]
    pool = "engine-a"
    slots = 512
    state = ["conv=bfloat16:4x96x3", "temporal=float32:4x2x16x8"]
    tp-size = 2
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mambapool.pool.errors import ConfigError
from mambapool.pool.layout import Geometry, TensorSpec
from mambapool.pool.models import load_model_config, state_shape
from mambapool.service.config import PoolConfig

_POOL_KEYS = {"pool": str, "slots": int, "model": str, "state": list, "tp-size": int}
_TOP_KEYS = {"dir": str, "max-sessions": int, "pool": list}


@dataclass(frozen=True, slots=True)
class FileSettings:
    """What a configuration file says; None where it is silent."""

    dir: str | None
    max_sessions: int | None
    pools: tuple[PoolConfig, ...]


def pool_config(name: str, slots: int, model: str | None, states: tuple[str, ...], tp_size: int) -> PoolConfig:
    """A pool as flags or a file describe it: by a model, by tensors, or by neither (allocator-only)."""
    if model and states:
        raise ConfigError(f"pool {name}: --model and --state both say what a state is; pass one of them")
    geometry = None
    if model:
        geometry = state_shape(load_model_config(model), tp_size).geometry()
    elif states:
        geometry = Geometry(tuple(TensorSpec.parse(state) for state in states))
    return PoolConfig(name, slots, geometry, tp_size)


def read_config_file(path: str) -> FileSettings:
    """Read a configuration file; a ``model`` path in it is relative to the file."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except ValueError as error:  # TOML syntax and UTF-8
        raise ConfigError(f"--config {path}: {error}") from error
    _check_keys(content, _TOP_KEYS, path)
    pools = []
    for number, entry in enumerate(content.get("pool", []), start=1):
        where = f"{path}, [[pool]] {number}"
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: expected a table, written [[pool]]")
        _check_keys(entry, _POOL_KEYS, where)
        pools.append(_pool(entry, where, Path(path).parent))
    return FileSettings(content.get("dir"), content.get("max-sessions"), tuple(pools))


def _pool(entry: dict[str, Any], where: str, base: Path) -> PoolConfig:
    if "slots" not in entry:
        raise ConfigError(f"{where}: slots is missing")
    states = entry.get("state", [])
    if not all(isinstance(state, str) for state in states):
        raise ConfigError(f"{where}: state must be a list of texts like conv=bfloat16:4x96x3")
    model = str(base / entry["model"]) if "model" in entry else None
    try:
        return pool_config(
            entry.get("pool", "default"), entry["slots"], model, tuple(states), entry.get("tp-size", 1)
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_keys(table: dict[str, Any], known: dict[str, type], where: str) -> None:
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; known are {', '.join(known)}")
        if type(value) is not known[key]:
            raise ConfigError(f"{where}: {key} must be of type {known[key].__name__}, not {type(value).__name__}")
