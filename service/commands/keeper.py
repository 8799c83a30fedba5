"""``mambapool keeper``."""

from __future__ import annotations

import click

from mambapool.pool.errors import ConfigError
from mambapool.pool.exits import EXIT_ALREADY_RUNNING, EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.service.commands.common import configure_logging, one_pool
from mambapool.service.commands.manual import Command
from mambapool.service.options import DURATION, dir_option, option, pool_options


@click.command(
    cls=Command,
    short_help="Keep one shard's memory alone, until SIGTERM.",
    examples=[
        (
            "mambapool keeper --slots 256 --model config.json --tp-size 4 --rank 2",
            "the third of four shards; start one for each rank, then the allocator",
        )
    ],
    exits=[EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_ALREADY_RUNNING],
)
@pool_options(required_slots=True, slots_help="Usable slots; ids are 1..N, row 0 is added.")
@option("--rank", type=click.IntRange(min=0), default=0, show_default=True, metavar="R", help="Whose shard.")
@option(
    "--exit-idle", type=DURATION, metavar="T", help="End T after the allocator has ended; not when it crashed."
)
@dir_option
def keeper(
    pool: str,
    slots: int,
    model: str | None,
    states: tuple[str, ...],
    tp_size: int,
    device: str,
    rank: int,
    exit_idle: float | None,
    directory: str | None,
) -> None:
    """Keep one shard's memory alone, until SIGTERM.

    For containers, and for an allocator that is exchanged while the states stay: `mambapool allocator`
    finds the keepers that live in its directory.
    """
    from mambapool.pool.keeper import KeeperConfig, keep

    configure_logging()
    (config,) = one_pool(pool, slots, model, states, tp_size, device)
    if config.geometry is None:
        raise ConfigError("a keeper needs --model or --state: it keeps the memory of states")
    place = RuntimeDir.for_server(directory).path
    keep(
        KeeperConfig(place, pool, rank, tp_size, slots, config.geometry, device=device, exit_idle_s=exit_idle),
        lambda _: click.echo(f"mambapool ready: keeper of {pool}, rank {rank} of {tp_size}, in {place}"),
    )
