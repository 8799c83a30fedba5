"""What ``serve`` is told: its flags, and the settings that come of them, the environment, a file and defaults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from mambapool.service.commands.common import one_pool
from mambapool.service.options import file_completion, option, pool_options, quarantine_option, refuse_empty

if TYPE_CHECKING:
    from mambapool.service.serve import ServeConfig
    from mambapool.service.settings import Source

F = TypeVar("F", bound=Callable[..., Any])

#: Parameter → its key in a configuration file.
_POOL_KEYS = {
    "pool": "pool",
    "slots": "slots",
    "model": "model",
    "states": "state",
    "tp_size": "tp-size",
    "device": "device",
}
_KEYS = {
    **_POOL_KEYS,
    "directory": "dir",
    "max_sessions": "max-sessions",
    "max_waiters": "max-waiters",
    "quarantine": "quarantine",
}


def serve_options(function: F) -> F:
    """The flags of ``serve``, but ``--dir``."""
    decorators = (
        pool_options(
            required_slots=False,
            slots_help="Usable slots; ids are 1..N, row 0 is added. Alone: an allocator-only pool, whose engine keeps "
            "its own tensors.",
        ),
        option("--max-sessions", type=int, metavar="N", help="Sessions per pool.  [default: 1024]"),
        option(
            "--max-waiters",
            type=int,
            metavar="N",
            help="Requests per pool that wait for slots.  [default: 1024]",
        ),
        quarantine_option,
        option(
            "--config",
            metavar="FILE.toml",
            callback=refuse_empty,
            shell_complete=file_completion,
            help="Several pools: [[pool]] tables with the flags' names as keys. Flags change the pool that --pool "
            "names, or the file's only one.",
        ),
    )
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def serve_config() -> ServeConfig:
    """What the current command's flags, the environment and the file come to; refused before anything is started."""
    from mambapool.service.config import AllocatorConfig
    from mambapool.service.serve import ServeConfig

    flags = click.get_current_context().params
    given = {key: flags[key] for key in ("max_sessions", "max_waiters")} | {"quarantine_s": flags["quarantine"]}
    directory = flags["directory"]
    if flags["config"] is None:
        pools = one_pool(
            flags["pool"], flags["slots"], flags["model"], flags["states"], flags["tp_size"], flags["device"]
        )
    else:
        from mambapool.service.config_file import read_config_file

        of_pool = {key: value for key, (value, _) in given_settings().items() if key in _POOL_KEYS.values()}
        found = read_config_file(flags["config"], of_pool)
        pools = found.pools
        directory = directory if directory is not None else found.dir
        for key, value in given.items():
            given[key] = value if value is not None else getattr(found, key)
    limits = {name: value for name, value in given.items() if value is not None}
    AllocatorConfig(Path(), pools, **limits)  # which checks them, and how they go together
    return ServeConfig(directory, pools, **limits)


def given_settings() -> dict[str, tuple[Any, Source]]:
    """What was given by flag or environment, and how, with the keys of a configuration file."""
    from mambapool.service.settings import Source

    context = click.get_current_context()
    found = {}
    for parameter in context.command.params:
        key = _KEYS.get(parameter.name or "")
        how = context.get_parameter_source(parameter.name or "")
        if key is None or how not in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT):
            continue
        by_flag = how is ParameterSource.COMMANDLINE
        name = parameter.opts[0] if by_flag else str(parameter.envvar)
        value = context.params[parameter.name or ""]
        value = list(value) if isinstance(value, tuple) else value
        found[key] = (value, Source("flag" if by_flag else "environment", name))
    return found
