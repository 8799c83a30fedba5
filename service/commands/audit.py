"""``mambapool audit``."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from mambapool.pool.exits import EXIT_DONE, EXIT_FAILED, EXIT_NOT_REACHABLE, EXIT_USAGE
from mambapool.service.commands.common import running_daemon
from mambapool.service.commands.manual import Command
from mambapool.service.options import DURATION, dir_option, json_option, option, timeout_option

if TYPE_CHECKING:
    from mambapool.service.cli import Client


@click.command(
    cls=Command,
    short_help="Check every slot; list who holds what for how long.",
    examples=[
        ("mambapool audit", "every slot, and who holds what"),
        ("mambapool audit --older-than 10m", "what may have leaked"),
    ],
    exits={
        EXIT_DONE: "every slot is in exactly one state",
        EXIT_FAILED: "something is wrong: the slots are named",
        EXIT_USAGE: "a flag or a variable that cannot be used",
        EXIT_NOT_REACHABLE: "no daemon is ready there, or it does not answer",
    },
)
@dir_option
@json_option
@option("--older-than", type=DURATION, default="0s", metavar="T", help="List only what is held for longer.")
@timeout_option
@click.pass_obj
def audit(client: Client, directory: str | None, as_json: bool, older_than: float, timeout: float) -> None:
    """Check that every slot is in exactly one state, and list who holds what for how long, and what for.

    The daemon serves meanwhile: it hands over a copy of each pool's lists, which are checked here. Exit status 1,
    and the slots named, when something is wrong. What --older-than leaves out is checked all the same.

    Ages and tags do not outlive a restart of the allocator. Of a guarantee, which its holder hands out itself, the
    age is that of the whole and there are no tags.
    """
    from mambapool.service.audit_report import audit_all

    place = running_daemon(directory)
    report = audit_all(
        client.ask_status(place, timeout), lambda pool: client.ask_audit(place, timeout, pool), older_than
    )
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        from mambapool.service.audit_report import draw

        draw(report)
    if not report.ok:
        sys.exit(EXIT_FAILED)
