"""``mambapool serve``."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.service.commands.common import configure_logging, one_pool
from mambapool.service.config import PoolConfig
from mambapool.service.options import dir_option, option, pool_options


@click.command(short_help="Run keepers and allocator, until Ctrl-C or SIGTERM.")
@pool_options(
    required_slots=False,
    slots_help="Usable slots; ids are 1..N, row 0 is added. Alone: an allocator-only pool, whose engine keeps "
    "its own tensors.",
)
@option("--max-sessions", type=int, metavar="N", help="Sessions per pool.  [default: 1024]")
@option("--max-waiters", type=int, metavar="N", help="Requests per pool that wait for slots.  [default: 1024]")
@option(
    "--config",
    metavar="FILE.toml",
    help="Several pools: [[pool]] tables with the flags' names as keys. Flags change the pool that --pool names, "
    "or the file's only one.",
)
@dir_option
def serve(
    pool: str,
    slots: int | None,
    model: str | None,
    states: tuple[str, ...],
    tp_size: int,
    device: str,
    max_sessions: int | None,
    max_waiters: int | None,
    config: str | None,
    directory: str | None,
) -> None:
    """Run keepers and allocator, in the foreground, until Ctrl-C or SIGTERM.

    Prints `mambapool ready …` once it answers. Without --slots it starts without a pool: clients make
    allocator-only ones.

    \b
    mambapool serve --slots 512 --state conv=bfloat16:4x96x3 --state temporal=float32:4x2x16x8
    mambapool serve --slots 256 --model Qwen3-Next-80B-A3B/config.json --tp-size 4
    """
    from mambapool.service.serve import ServeConfig
    from mambapool.service.serve import serve as run

    configure_logging()
    if config is None:
        pools = one_pool(pool, slots, model, states, tp_size, device)
    else:
        from mambapool.service.config_file import read_config_file

        settings = read_config_file(config, _given_pool_flags())
        directory = directory if directory is not None else settings.dir
        max_sessions = max_sessions if max_sessions is not None else settings.max_sessions
        max_waiters = max_waiters if max_waiters is not None else settings.max_waiters
        pools = settings.pools
    given = {"max_sessions": max_sessions, "max_waiters": max_waiters}
    limits = {name: value for name, value in given.items() if value is not None}
    run(ServeConfig(directory, pools, **limits), _say_ready(pools))


def _given_pool_flags() -> dict[str, Any]:
    """What of a pool was given by flag or environment, with the keys of a configuration file."""
    context = click.get_current_context()
    keys = {"pool": "pool", "slots": "slots", "model": "model", "states": "state", "tp_size": "tp-size"}
    given = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return {
        key: context.params[name]
        for name, key in {**keys, "device": "device"}.items()
        if context.get_parameter_source(name) in given
    }


def _say_ready(pools: tuple[PoolConfig, ...]) -> Any:
    def say(directory: RuntimeDir, ready: dict[str, Any]) -> None:
        described = ", ".join(_describe(pool) for pool in pools) or "no pool yet"
        click.echo(f"mambapool ready: {directory.path}, pid {ready['pid']}, {described}")

    return say


def _describe(pool: PoolConfig) -> str:
    if pool.geometry is None:
        return f"pool {pool.name}: {pool.slots} slots, allocator-only"
    shards = f" on {pool.shards} shards" if pool.shards > 1 else ""
    return f"pool {pool.name}: {pool.slots} slots of {pool.geometry.bytes_per_slot} bytes{shards}"
