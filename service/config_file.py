"""``serve --config FILE.toml``: several pools, with the flags' names as keys.

::

    max-sessions = 1024

    [[pool]]
    pool = "engine-a"
    slots = 512
    state = ["conv=bfloat16:4x96x3", "temporal=float32:4x2x16x8"]
    tp-size = 2

Flags and the environment win: with them the pool that ``--pool`` names, or the file's only one, is changed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mambapool.pool.errors import ConfigError
from mambapool.pool.layout import Geometry, TensorSpec
from mambapool.pool.models import load_model_config, state_shape
from mambapool.pool.regular_files import read_regular
from mambapool.service.config import DEFAULT_POOL, PoolConfig

_POOL_KEYS = {"pool": str, "slots": int, "model": str, "state": list, "tp-size": int, "device": str}
_TOP_KEYS = {"dir": str, "max-sessions": int, "max-waiters": int, "quarantine": str, "pool": list}

#: A pool takes some hundred; only a file named by mistake is larger.
MAX_FILE_BYTES = 2**20

_WORDS = {str: "a text", int: "a whole number", list: "a list"}


@dataclass(frozen=True, slots=True)
class FileSettings:
    """What a configuration file says; None where it is silent."""

    dir: str | None
    max_sessions: int | None
    max_waiters: int | None
    pools: tuple[PoolConfig, ...]
    quarantine_s: float | None = None


#: A pool's keys, with what holds for those that nobody names.
POOL_DEFAULTS: dict[str, Any] = {
    "pool": DEFAULT_POOL,
    "slots": None,
    "model": None,
    "state": [],
    "tp-size": 1,
    "device": "cpu",
}


@dataclass(frozen=True, slots=True)
class Entries:
    """Pools as keys and values. ``changed`` is the one that flags belong to, by its place."""

    top: dict[str, Any]
    pools: list[dict[str, Any]]
    changed: int | None
    from_file: tuple[frozenset[str], ...]

    def in_file(self, number: int) -> frozenset[str]:
        """The keys that the file has of that pool."""
        return self.from_file[number] if number < len(self.from_file) else frozenset()


def pool_config(
    name: str, slots: int, model: str | None, states: tuple[str, ...], tp_size: int, device: str = "cpu"
) -> PoolConfig:
    """A pool as flags or a file describe it: by a model, by tensors, or by neither (allocator-only)."""
    if model and states:
        raise ConfigError(f"pool {name}: --model and --state both say what a state is; pass one of them")
    geometry = None
    if model:
        geometry = state_shape(load_model_config(model), tp_size).geometry()
    elif states:
        geometry = Geometry(tuple(TensorSpec.parse(state) for state in states))
    return PoolConfig(name, slots, geometry, tp_size, device)


def read_config_file(path: str, flags: Mapping[str, Any]) -> FileSettings:
    """Read a configuration file; a ``model`` path in it is relative to the file.

    ``flags`` are the keys of a pool that were given by flag or environment, and win over the file's.
    """
    entries = read_entries(path, flags)
    pools = tuple(
        _pool(entry, f"{path}, [[pool]] {number}") for number, entry in enumerate(entries.pools, start=1)
    )
    top = entries.top
    quarantine_s = _duration(top["quarantine"], path) if "quarantine" in top else None
    return FileSettings(top.get("dir"), top.get("max-sessions"), top.get("max-waiters"), pools, quarantine_s)


def read_entries(path: str, flags: Mapping[str, Any]) -> Entries:
    """What the file and the flags say together, not held against each other yet."""
    content = _read(path)
    pools = _pool_entries(content, path)
    from_file = tuple(frozenset(entry) for entry in content.pop("pool", []))
    return Entries(content, pools, _apply_flags(pools, flags, path), from_file)


def _duration(text: str, where: str) -> float:
    from mambapool.service.options import parse_duration

    try:
        return parse_duration(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: quarantine: {error}") from error


def _read(path: str) -> dict[str, Any]:
    try:
        text = read_regular(path, MAX_FILE_BYTES)
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"--config {path} has more than {MAX_FILE_BYTES} bytes: that is no list of pools")
        content = tomllib.loads(text.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # TOML syntax and UTF-8; nested too deeply
        raise ConfigError(f"--config {path}: {error}") from error
    if isinstance(content.get("pool"), dict):
        raise ConfigError(f"{path}: write [[pool]], with two brackets: there can be several")
    _check_keys(content, _TOP_KEYS, path)
    return content


def _pool_entries(content: dict[str, Any], path: str) -> list[dict[str, Any]]:
    entries = []
    for number, entry in enumerate(content.get("pool", []), start=1):
        where = f"{path}, [[pool]] {number}"
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: expected a table, written [[pool]]")
        _check_keys(entry, _POOL_KEYS, where)
        model = {"model": str(Path(path).parent / entry["model"])} if "model" in entry else {}
        entries.append({"pool": DEFAULT_POOL, **entry, **model})
    return entries


def _apply_flags(entries: list[dict[str, Any]], flags: Mapping[str, Any], path: str) -> int | None:
    """Change the pool that is meant, or add it if the flags say of how many slots; its place, if there is one."""
    if not flags.keys() - {"pool"}:
        return None
    names = [entry["pool"] for entry in entries]
    name = flags.get("pool", names[0] if len(names) == 1 else DEFAULT_POOL)
    if name in names:
        entry = entries[names.index(name)]
        if flags.keys() & {"model", "state"}:
            entry.pop("model", None)
            entry.pop("state", None)
        entry.update(flags)
        return names.index(name)
    if "slots" in flags:
        entries.append({**flags, "pool": name})
        return len(entries) - 1
    if flags.keys() & {"model", "state"}:
        raise ConfigError(f"--config {path} has no pool {name!r}: name one with --pool, or its --slots N")
    return None


def _pool(entry: dict[str, Any], where: str) -> PoolConfig:
    if "slots" not in entry:
        raise ConfigError(f"{where}: slots is missing")
    states = entry.get("state", [])
    if not all(isinstance(state, str) for state in states):
        raise ConfigError(f"{where}: state must be a list of texts like conv=bfloat16:4x96x3")
    try:
        return pool_config(
            entry["pool"],
            entry["slots"],
            entry.get("model"),
            tuple(states),
            entry.get("tp-size", 1),
            entry.get("device", "cpu"),
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check_keys(table: dict[str, Any], known: dict[str, type], where: str) -> None:
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; known here are {', '.join(known)}")
        if type(value) is not known[key]:
            raise ConfigError(f"{where}: {key} must be {_WORDS[known[key]]}, not {value!r}"[:300])
        if value == "":
            raise ConfigError(f"{where}: {key} is empty; leave it out, or say what it is")
