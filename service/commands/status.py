"""``mambapool status``."""

from __future__ import annotations

import json

import click

from mambapool.pool.exits import EXIT_DONE, EXIT_FAILED, EXIT_NOT_REACHABLE, EXIT_USAGE
from mambapool.service.commands.common import running_daemon
from mambapool.service.commands.manual import Command
from mambapool.service.options import DURATION, dir_option, json_option, option


@click.command(
    cls=Command,
    short_help="Show pools, holders and counts of a running daemon.",
    examples=[
        ("mambapool status", "tables"),
        ("mambapool status --json | jq '.pools[0].free'", "a number for a script"),
    ],
    exits=[EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_NOT_REACHABLE],
)
@dir_option
@json_option
@option("--timeout", type=DURATION, default="2s", show_default=True, metavar="T", help="Wait so long for it.")
def status(directory: str | None, as_json: bool, timeout: float) -> None:
    """Show pools, holders and counts of a running daemon. Counts are of slots.

    held: by requests; windows: granted to a window that is open; offered: in a transfer that nobody has accepted yet. A
    session is live, suspect (it has said nothing for seconds; it keeps its slots) or gone.
    """
    from mambapool.client.operators import ask_status

    found = ask_status(running_daemon(directory), timeout)
    if as_json:
        click.echo(json.dumps(found))
        return
    from mambapool.service.drawing import draw_status

    draw_status(found)
