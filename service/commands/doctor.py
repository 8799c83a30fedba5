"""``mambapool doctor``."""

from __future__ import annotations

import json
import sys

import click

from mambapool.pool.exits import EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from mambapool.service.commands.manual import Command
from mambapool.service.options import dir_option, json_option, option


@click.command(
    cls=Command,
    short_help="Look whether mambapool can work on this machine.",
    examples=[
        ("mambapool doctor", "what was found, and what to do where something is missing"),
        ("mambapool doctor --device cuda --json", "for a script that needs a GPU"),
    ],
    exits={
        EXIT_DONE: "nothing stands in the way",
        EXIT_FAILED: "something will not work: what to do is said",
        EXIT_USAGE: "a flag or a variable that cannot be used",
    },
)
@dir_option
@option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="With cuda it fails where no GPU can be used.",
)
@json_option
def doctor(directory: str | None, device: str, as_json: bool) -> None:
    """Look whether mambapool can work on this machine, and say what to do where it cannot.

    Needs no daemon and no GPU.
    """
    from mambapool.service.doctor_gpu import look_at_gpus
    from mambapool.service.doctor_host import look_at_host
    from mambapool.service.findings import BAD

    findings = [*look_at_host(directory), *look_at_gpus(wanted=device == "cuda")]
    if as_json:
        click.echo(json.dumps([finding.to_json() for finding in findings]))
    else:
        from mambapool.service.drawing import draw_findings

        draw_findings(findings)
    if any(finding.state == BAD for finding in findings):
        sys.exit(EXIT_FAILED)
