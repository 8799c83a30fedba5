"""``mambapool allocator``."""

from __future__ import annotations

import click

from mambapool.pool.exits import EXIT_ALREADY_RUNNING, EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from mambapool.pool.runtime_dir import RuntimeDir, check_pool_name
from mambapool.service.commands.common import configure_logging
from mambapool.service.commands.manual import Command
from mambapool.service.config import DEFAULT_POOL, AllocatorConfig, PoolConfig
from mambapool.service.options import DURATION, dir_option, option, quarantine_option


@click.command(
    cls=Command,
    short_help="Run the allocator alone, until SIGTERM.",
    examples=[
        ("mambapool allocator", "beside keepers that run, or alone for pools that clients make"),
        ("mambapool allocator --pool default", "when all keepers of that pool run"),
        ("mambapool allocator --slots 256", "with an allocator-only pool"),
    ],
    exits=[EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_ALREADY_RUNNING],
)
@option("--pool", metavar="NAME", help="Pool that --slots makes [default: default], or whose keepers to wait for.")
@option("--slots", type=int, metavar="N", help="Make an allocator-only pool of N slots.")
@option("--max-sessions", type=int, metavar="N", default=1024, show_default=True, help="Sessions per pool.")
@option("--max-waiters", type=int, metavar="N", default=1024, show_default=True, help="Waiting requests per pool.")
@option("--wait", type=DURATION, default="30s", show_default=True, metavar="T", help="Wait so long for them.")
@quarantine_option
@option("--exit-idle", type=DURATION, metavar="T", help="End T after the last session has ended.")
@dir_option
def allocator(
    pool: str | None,
    slots: int | None,
    max_sessions: int,
    max_waiters: int,
    wait: float,
    quarantine: float | None,
    exit_idle: float | None,
    directory: str | None,
) -> None:
    """Run the allocator alone, until SIGTERM; it serves the keepers that live in its directory.

    With --pool and without --slots it starts when every shard of that pool has its keeper. Keepers that come
    later than the allocator are served by the next one. What an allocator before it left there, it takes over:
    sessions that still live keep their slots.
    """
    from mambapool.service.server import run_allocator

    configure_logging()
    pools = (PoolConfig(DEFAULT_POOL if pool is None else pool, slots),) if slots is not None else ()
    place = RuntimeDir.for_server(directory)
    run_allocator(
        AllocatorConfig(
            place.path,
            pools,
            max_sessions,
            max_waiters,
            1.0 if quarantine is None else quarantine,
            wait_for=check_pool_name(pool) if pool is not None and slots is None else None,
            wait_s=wait,
            exit_idle_s=exit_idle,
        ),
        lambda ready: click.echo(f"mambapool ready: pid {ready['pid']}, {ready['endpoint']}"),
    )
