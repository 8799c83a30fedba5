"""``mambapool bench``."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import click

from mambapool.pool.errors import ConfigError
from mambapool.pool.exits import EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from mambapool.pool.regular_files import read_regular
from mambapool.service.commands.manual import Command
from mambapool.service.options import json_option, option

#: Ours has some ten thousand; it is looked for in every folder above.
_MOST_PROJECT_BYTES = 2**20


@click.command(
    cls=Command,
    short_help="Measure every figure of the README.",
    examples=[
        ("mambapool bench", "all figures, with the goals that they have"),
        ("mambapool bench --goal 7 --json", "one of them, for a script"),
    ],
    exits={
        EXIT_DONE: "every goal is met, or not judged",
        EXIT_FAILED: "a goal is missed",
        EXIT_USAGE: "a flag that cannot be used, or no checkout here",
    },
)
@option("--goal", type=int, multiple=True, metavar="N", help="Only this goal. Repeatable.")
@option("--quick", is_flag=True, help="Short, for CI: the figures are printed, not judged.")
@json_option
def bench(goal: tuple[int, ...], quick: bool, as_json: bool) -> None:
    """Measure every figure of the README, each against its yardstick in the same run.

    Runs the scripts in bench/ of the checkout that the working directory is in. Exit status 1 when a goal is missed.
    """
    script = _checkout(Path.cwd()) / "bench" / "run.py"
    flags = [flag for number in goal for flag in ("--goal", str(number))]
    flags += ["--quick"] if quick else []
    flags += ["--json"] if as_json else []
    sys.exit(subprocess.run([sys.executable, str(script), *flags], check=False).returncode)


def _checkout(place: Path) -> Path:
    """The checkout that ``place`` is in."""
    for folder in (place, *place.parents):
        if (folder / "bench" / "run.py").is_file() and _is_ours(folder / "pyproject.toml"):
            return folder
    raise ConfigError(
        f"bench runs the scripts in bench/ of a checkout of mambapool, and {place} is in none: "
        "clone the repository, and run it there"
    )


def _is_ours(project: Path) -> bool:
    try:
        found: bool = (
            tomllib.loads(read_regular(project, _MOST_PROJECT_BYTES).decode())["project"]["name"] == "mambapool"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return found
