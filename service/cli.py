"""The command line: its commands, and how their errors end."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

import click

from mambapool.pool.errors import MambaPoolError
from mambapool.pool.exits import EXIT_FAILED, exit_status
from mambapool.pool.version import VERSION
from mambapool.service.commands.allocator import allocator
from mambapool.service.commands.audit import audit
from mambapool.service.commands.bench import bench
from mambapool.service.commands.completion import PROGRAM, VARIABLE, completion
from mambapool.service.commands.config import config
from mambapool.service.commands.doctor import doctor
from mambapool.service.commands.evict import evict_command
from mambapool.service.commands.geometry import geometry
from mambapool.service.commands.keeper import keeper
from mambapool.service.commands.replay import replay
from mambapool.service.commands.scheduler import scheduler
from mambapool.service.commands.serve import serve
from mambapool.service.commands.status import status


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every flag but `evict --force` has an environment variable, MAMBAPOOL_ + its name. Exit status: 0 done, "
    "1 failed, 2 usage, 3 another daemon has the directory, 4 not reachable.",
)
@click.version_option(VERSION, prog_name="mambapool")
def command_line() -> None:
    """Slots of a shared Mamba state pool for many processes.

    One allocator process owns the list of free slots and hands out ids; keepers hold the memory, which every
    worker maps. Start with `mambapool serve`, look with `mambapool status`.
    """


def main() -> None:
    """Run the command line; every expected error is one line on stderr, and an exit status."""
    if os.getpid() == 1:
        # In a container: the kernel gives process 1 no default action, so that a stop would be lost.
        signal.signal(signal.SIGTERM, _end)
    try:
        # What comes back is the status of --help, --version and Context.exit, None otherwise.
        sys.exit(command_line(prog_name=PROGRAM, complete_var=VARIABLE, standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except MambaPoolError as error:
        click.echo(f"mambapool: {error}", err=True)
        sys.exit(exit_status(error))
    except ImportError as error:
        if "mambapool[worker]" not in str(error):
            raise
        click.echo(f"mambapool: {error}", err=True)
        sys.exit(EXIT_FAILED)
    except OSError as error:
        click.echo(f"mambapool: {error}", err=True)
        sys.exit(EXIT_FAILED)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


for _command in (
    serve,
    keeper,
    allocator,
    status,
    audit,
    doctor,
    evict_command,
    geometry,
    replay,
    scheduler,
    bench,
    config,
    completion,
):
    command_line.add_command(_command)
