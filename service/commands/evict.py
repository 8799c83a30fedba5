"""``mambapool evict``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from mambapool.pool.exits import EXIT_DONE, EXIT_FAILED, EXIT_NOT_REACHABLE, EXIT_USAGE
from mambapool.service.commands.common import running_daemon
from mambapool.service.commands.manual import Command
from mambapool.service.options import dir_option, json_option, timeout_option

if TYPE_CHECKING:
    from mambapool.service.cli import Client

#: Below ``protocol.MAX_NUMBER``, which is written out here: importing it imports numpy, for every ``--help``.
SESSION = click.IntRange(1, 2**63 - 1)


@click.command(
    cls=Command,
    name="evict",
    short_help="End a session and free its slots.",
    examples=[("mambapool evict 3", "its number is in `mambapool status`")],
    exits={
        EXIT_DONE: "evicted",
        EXIT_FAILED: "refused: its process is alive, or there is no such session",
        EXIT_USAGE: "a flag or a variable that cannot be used",
        EXIT_NOT_REACHABLE: "no daemon is ready there, or it does not answer",
    },
)
@click.argument("holder", type=SESSION)
# No variable sets it: it shall be said each time, of the session that is meant.
@click.option("--force", is_flag=True, help="Evict it although its process lives and may still write.")
@dir_option
@json_option
@timeout_option
@click.pass_obj
def evict_command(
    client: Client, holder: int, force: bool, directory: str | None, as_json: bool, timeout: float
) -> None:
    """End session number HOLDER (see `mambapool status`) and free what it holds.

    For a process that hangs for good, or one that lives where nobody can end it. Refused while the process
    is alive, unless --force: it may still write to slots that somebody else gets. A session of a group stands
    for all its ranks.
    """
    result = client.evict(running_daemon(directory), timeout, holder, force=force)
    if result["alive"]:
        click.echo(f"mambapool: warning: session {holder} was alive; its process may still write", err=True)
    if as_json:
        click.echo(json.dumps({"session": holder, **result}))
    else:
        click.echo(f"session {holder} evicted: {result['slots']} slots freed")
