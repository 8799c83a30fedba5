"""``mambapool allocator``."""

from __future__ import annotations

import click

from mambapool.pool.exits import EXIT_ALREADY_RUNNING, EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.service.commands.common import configure_logging
from mambapool.service.commands.manual import Command
from mambapool.service.config import AllocatorConfig, PoolConfig
from mambapool.service.options import dir_option, option, quarantine_option


@click.command(
    cls=Command,
    short_help="Run the allocator alone, until SIGTERM.",
    examples=[
        ("mambapool allocator", "beside keepers that run, or alone for pools that clients make"),
        ("mambapool allocator --slots 256", "with an allocator-only pool"),
    ],
    exits=[EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_ALREADY_RUNNING],
)
@option(
    "--pool", default="default", show_default=True, metavar="NAME", help="Name of the pool that --slots makes."
)
@option("--slots", type=int, metavar="N", help="Make an allocator-only pool of N slots.")
@option("--max-sessions", type=int, metavar="N", default=1024, show_default=True, help="Sessions per pool.")
@option("--max-waiters", type=int, metavar="N", default=1024, show_default=True, help="Waiting requests per pool.")
@quarantine_option
@dir_option
def allocator(
    pool: str,
    slots: int | None,
    max_sessions: int,
    max_waiters: int,
    quarantine: float | None,
    directory: str | None,
) -> None:
    """Run the allocator alone, until SIGTERM; it serves the keepers that live in its directory.

    What an allocator before it left there, it takes over: sessions that still live keep their slots.
    """
    from mambapool.service.server import run_allocator

    configure_logging()
    pools = (PoolConfig(pool, slots),) if slots is not None else ()
    place = RuntimeDir.for_server(directory)
    run_allocator(
        AllocatorConfig(place.path, pools, max_sessions, max_waiters, 1.0 if quarantine is None else quarantine),
        lambda ready: click.echo(f"mambapool ready: pid {ready['pid']}, {ready['endpoint']}"),
    )
