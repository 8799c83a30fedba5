"""``mambapool scheduler``."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import click

from mambapool.pool.exits import EXIT_DONE, EXIT_FAILED, EXIT_NOT_REACHABLE, EXIT_USAGE
from mambapool.service.commands.common import running_daemon
from mambapool.service.commands.manual import Command
from mambapool.service.options import DURATION, dir_option, option

if TYPE_CHECKING:
    from mambapool.service.cli import Client


@click.command(
    cls=Command,
    short_help="Be one scheduler of a replay that runs elsewhere.",
    examples=[
        ("mambapool scheduler --name worker-0 --wait 5m", "in a container with the replay's runtime directory"),
        ("mambapool scheduler --scheduler 1 --rank 0", "where each rank has a container of its own"),
    ],
    exits={
        EXIT_DONE: "its share of the replay is done, and the replay knows what it found",
        EXIT_FAILED: "it could not go on, or the replay ended before it",
        EXIT_USAGE: "a flag or a variable that cannot be used",
        EXIT_NOT_REACHABLE: "no daemon is ready there, or no replay waits for schedulers",
    },
)
@option("--name", metavar="NAME", help="What the replay calls it.  [default: the host's name]")
@option("--scheduler", "number", type=click.IntRange(min=0), metavar="M", help="Which one to be.  [default: any]")
@option("--rank", type=click.IntRange(min=0), metavar="R", help="Which of its ranks.  [default: any]")
@option("--wait", type=DURATION, default="60s", show_default=True, metavar="T", help="Wait so long for a replay.")
@dir_option
@click.pass_obj
def scheduler(
    client: Client, name: str | None, number: int | None, rank: int | None, wait: float, directory: str | None
) -> None:
    """Be one of the schedulers that `mambapool replay TRACE --elsewhere` waits for, in a container for example.

    The replay says which requests to run; its TRACE must have the same path here. With its --tp-size T one of the T
    ranks of a scheduler. Needs torch.
    """
    most = client.most_schedulers()
    for flag, value in (("--scheduler", number), ("--rank", rank)):
        if value is not None and value >= most:
            raise click.BadParameter(f"{flag} {value}: a replay has 0 to {most - 1}")
    place = running_daemon(directory)
    client.join_replay(place, name or socket.gethostname(), wait, number, rank)
    # Before torch is imported: the schedulers share the processors, and would only take them from each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        status = client.run_scheduler()
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("a scheduler needs torch: pip install 'mambapool[worker]'") from error
    # As the module does it where it is started alone, and for the same reason.
    os._exit(status)
