"""``mambapool serve``."""

from __future__ import annotations

from typing import Any

import click

from mambapool.pool.exits import EXIT_ALREADY_RUNNING, EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.service.commands.common import configure_logging
from mambapool.service.commands.manual import Command
from mambapool.service.commands.serving import serve_config, serve_options
from mambapool.service.config import PoolConfig
from mambapool.service.options import dir_option


@click.command(
    cls=Command,
    short_help="Run keepers and allocator, until Ctrl-C or SIGTERM.",
    examples=[
        (
            "mambapool serve --slots 512 --state conv=bfloat16:4x96x3 --state temporal=float32:4x2x16x8",
            "a pool of 512 slots, each with two tensors of 4 layers",
        ),
        (
            "mambapool serve --slots 256 --model Qwen3-Next-80B-A3B/config.json --tp-size 4",
            "the state of a model, on 4 shards",
        ),
        ("mambapool serve --config pools.toml", "several pools; `mambapool config show` shows what comes of it"),
    ],
    exits={
        EXIT_DONE: "ended by a signal",
        EXIT_FAILED: "a keeper died and its states are gone, the allocator kept crashing, there is not enough memory, "
        "or the directory cannot be used",
        EXIT_USAGE: "a flag, a variable or a file that cannot be used",
        EXIT_ALREADY_RUNNING: "another daemon has the directory, and is undisturbed",
    },
)
@serve_options
@dir_option
def serve(**_flags: Any) -> None:
    """Run keepers and allocator, in the foreground, until Ctrl-C or SIGTERM.

    Prints `mambapool ready …` once it answers. An allocator that crashes is brought back, and the states stay. Without
    --slots it starts without a pool: clients make allocator-only ones. Logs go to stderr.
    """
    from mambapool.service.serve import serve as run

    configure_logging()
    config = serve_config()
    run(config, _say_ready(config.pools))


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
