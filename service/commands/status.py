"""``mambapool status``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mambapool.pool.errors import AllocatorUnavailable, PoolLost
from mambapool.pool.exits import EXIT_DONE, EXIT_FAILED, EXIT_NOT_REACHABLE, EXIT_USAGE
from mambapool.pool.layout import MAX_TP_SIZE
from mambapool.pool.runtime_dir import RuntimeDir, candidates, check_pool_name
from mambapool.service.commands.common import running_daemon
from mambapool.service.commands.manual import Command
from mambapool.service.config import DEFAULT_POOL
from mambapool.service.options import dir_option, json_option, option, timeout_option

if TYPE_CHECKING:
    from mambapool.service.cli import Client


@click.command(
    cls=Command,
    short_help="Show pools, holders and counts of a running daemon.",
    examples=[
        ("mambapool status", "tables"),
        ("mambapool status --json | jq '.pools[0].free'", "a number for a script"),
        ("mambapool status --keeper --rank 2", "a container's health: whether that keeper answers"),
    ],
    exits={
        EXIT_DONE: "done",
        EXIT_FAILED: "failed; the last line on stderr says why",
        EXIT_USAGE: "a flag, a variable or a file that cannot be used",
        EXIT_NOT_REACHABLE: "no daemon, or with --keeper no keeper, is ready there, or it does not answer",
    },
)
@option("--keeper", "of_keeper", is_flag=True, help="Ask the keeper of --pool and --rank; needs no allocator.")
@option("--pool", default=DEFAULT_POOL, show_default=True, metavar="NAME", help="With --keeper: of which pool.")
@option(
    "--rank",
    type=click.IntRange(0, MAX_TP_SIZE - 1),
    default=0,
    show_default=True,
    metavar="R",
    help="… of which rank.",
)
@dir_option
@json_option
@timeout_option
@click.pass_obj
def status(
    client: Client, of_keeper: bool, pool: str, rank: int, directory: str | None, as_json: bool, timeout: float
) -> None:
    """Show pools, holders and counts of a running daemon. Counts are of slots.

    held: by requests; windows: granted to a window that is open; offered: in a transfer that nobody has accepted yet. A
    session is live, suspect (it has said nothing for seconds; it keeps its slots) or gone.
    """
    check_pool_name(pool)
    if of_keeper:
        _show_keeper(directory, pool, rank, timeout, as_json=as_json)
        return
    found = client.ask_status(running_daemon(directory), timeout)
    if as_json:
        click.echo(json.dumps(found))
        return
    from mambapool.service.drawing import draw_status

    draw_status(found)


def _show_keeper(named: str | None, pool: str, rank: int, timeout: float, *, as_json: bool) -> None:
    from mambapool.service.keepers import describe_shard

    places = [RuntimeDir(path.absolute()) for path in ([Path(named)] if named is not None else candidates())]
    directory = next((place for place in places if place.keeper_socket(pool, rank).exists()), places[0])
    try:
        shard = describe_shard(directory, pool, rank, timeout)
    except PoolLost as error:
        raise AllocatorUnavailable(str(error)) from error
    told = {name: getattr(shard, name) for name in ("pool", "rank", "tp_size", "slots", "size_bytes", "pid")}
    if as_json:
        click.echo(json.dumps(told))
    else:
        click.echo(
            f"keeper of pool {pool}, rank {rank} of {shard.tp_size}: {shard.slots} slots, "
            f"{shard.size_bytes} bytes, pid {shard.pid}"
        )
