"""The command line: its commands, and how their errors end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mambapool.pool.errors import MambaPoolError
from mambapool.pool.exits import EXIT_FAILED, exit_status
from mambapool.pool.runtime_dir import RuntimeDir
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

if TYPE_CHECKING:
    from mambapool.client.replay.options import ReplayOptions
    from mambapool.client.replay.summary import ReplaySummary


class Client:
    """What commands use of the client, which nothing else of the service imports: it is their context's object.

    Each part is imported when it is used: the client takes longer than most commands, and a replay needs torch.
    """

    def ask_status(self, directory: RuntimeDir, timeout: float) -> dict[str, Any]:
        from mambapool.client.operators import ask_status

        return ask_status(directory, timeout)

    def ask_audit(self, directory: RuntimeDir, timeout: float, pool: str) -> dict[str, Any]:
        from mambapool.client.operators import ask_audit

        return ask_audit(directory, timeout, pool)

    def evict(self, directory: RuntimeDir, timeout: float, session: int, *, force: bool) -> dict[str, Any]:
        from mambapool.client.operators import evict

        return evict(directory, timeout, session, force=force)

    def replay_options(self, **fields: Any) -> ReplayOptions:
        from mambapool.client.replay.options import ReplayOptions

        return ReplayOptions(**fields)

    def check_plot(self, path: Path) -> None:
        from mambapool.client.replay.plot import check_plot

        check_plot(path)

    def run_replay(
        self, options: ReplayOptions, progress: Callable[[int, int], None], plot: Path | None
    ) -> ReplaySummary:
        from mambapool.client.replay.command import run_replay

        return run_replay(options, progress, plot)

    def most_schedulers(self) -> int:
        from mambapool.client.replay.options import MOST_SCHEDULERS

        return MOST_SCHEDULERS

    def join_replay(
        self, directory: RuntimeDir, name: str, timeout: float, scheduler: int | None, rank: int | None
    ) -> None:
        from mambapool.client.replay.joining import join

        join(directory, name, timeout, scheduler, rank)

    def run_scheduler(self) -> int:
        """Imports torch."""
        from mambapool.client.replay.worker_process import main

        return main()


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every flag but `evict --force` has an environment variable, MAMBAPOOL_ + its name. Exit status: 0 done, "
    "1 failed, 2 usage, 3 another daemon has the directory, 4 not reachable.",
)
@click.version_option(VERSION, prog_name="mambapool")
@click.pass_context
def command_line(context: click.Context) -> None:
    """Slots of a shared Mamba state pool for many processes.

    One allocator process owns the list of free slots and hands out ids; keepers hold the memory, which every
    worker maps. Start with `mambapool serve`, look with `mambapool status`.
    """
    context.obj = Client()


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
