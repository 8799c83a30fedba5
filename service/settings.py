"""What ``serve`` would run with, and where each value comes from: flag > environment > file > default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mambapool.pool.runtime_dir import server_path
from mambapool.service.config_file import POOL_DEFAULTS, Entries, read_entries
from mambapool.service.serve import ServeConfig


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value comes from: ``kind`` is flag, environment, file or default, ``name`` the flag, variable or file."""

    kind: str
    name: str | None = None

    def __str__(self) -> str:
        return self.kind if self.name is None else f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One value; ``pool`` is None for those of the whole daemon."""

    pool: str | None
    name: str
    value: Any
    source: Source

    def to_json(self) -> dict[str, Any]:
        return {
            "pool": self.pool,
            "setting": self.name,
            "value": self.value,
            "source": self.source.kind,
            "from": self.source.name,
        }


def settings(config: str | None, given: Mapping[str, tuple[Any, Source]]) -> list[Setting]:
    """The daemon's settings, then those of every pool. ``given``: what flags and the environment say, by its key in
    a configuration file. Raises :class:`~mambapool.pool.errors.ConfigError` as ``serve`` would."""
    flags = {key: value for key, (value, _) in given.items() if key in POOL_DEFAULTS}
    entries = read_entries(config, flags) if config is not None else _without_file(flags)
    found = [_of_daemon(key, default, entries, config, given) for key, default in _defaults().items()]
    for number, entry in enumerate(entries.pools):
        for key, default in POOL_DEFAULTS.items():
            value = entry.get(key, default)
            if number == entries.changed and key in given:
                source = given[key][1]
            else:
                source = Source("file", config) if key in entries.in_file(number) else Source("default")
            found.append(Setting(entry.get("pool", POOL_DEFAULTS["pool"]), key, value, source))
    return found


def _defaults() -> dict[str, Any]:
    fields = ServeConfig.__dataclass_fields__
    return {
        "dir": str(server_path(None)),
        "max-sessions": fields["max_sessions"].default,
        "max-waiters": fields["max_waiters"].default,
        "quarantine": fields["quarantine_s"].default,
    }


def _of_daemon(
    key: str, default: Any, entries: Entries, config: str | None, given: Mapping[str, tuple[Any, Source]]
) -> Setting:
    if key in given:
        value, source = given[key]
    elif key in entries.top:
        value, source = entries.top[key], Source("file", config)
    else:
        value, source = default, Source("default")
    if key == "dir":
        value = str(Path(value).absolute())
    elif key == "quarantine" and not isinstance(value, str):
        value = f"{value:g}s"  # as a file has it
    return Setting(None, key, value, source)


def _without_file(flags: Mapping[str, Any]) -> Entries:
    pools = [dict(flags)] if "slots" in flags else []
    return Entries({}, pools, changed=0 if pools else None, from_file=())
