"""``mambapool status``."""

from __future__ import annotations

import json

import click

from mambapool.service.commands.common import running_daemon
from mambapool.service.options import DURATION, dir_option, json_option, option


@click.command(short_help="Show pools, holders and counts of a running daemon.")
@dir_option
@json_option
@option("--timeout", type=DURATION, default="2s", show_default=True, metavar="T", help="Wait so long for it.")
def status(directory: str | None, as_json: bool, timeout: float) -> None:
    """Show pools, holders and counts of a running daemon. Counts are of slots."""
    from mambapool.client.transport import ask_status

    found = ask_status(running_daemon(directory), timeout)
    if as_json:
        click.echo(json.dumps(found))
        return
    from mambapool.service.drawing import draw_status

    draw_status(found)
