"""``make bench``, ``mambapool bench``: every figure of the README, each script in a process of its own.

Prints a table; with ``--json`` a list of ``{"goal", "name", "value", "limit", "better", "met"}``. What is going on is
said on stderr. Exit status 1 when a goal is missed or a script fails; with ``--quick`` figures are not judged.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from measuring.figures import EXIT_SKIPPED, say

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Script:
    """``NAME.py`` prints a JSON list of figures.

    Where it cannot measure it ends with status ``EXIT_SKIPPED``, or its list is empty; stderr says why.
    """

    name: str
    goals: tuple[int, ...]
    #: What makes it short.
    quick: tuple[str, ...] = ("--quick",)


SCRIPTS = (
    Script("round_trip", (1, 2)),
    Script("first_daemons", (3,)),
    Script("capacity", (4,)),
    Script("inside_window", (5,)),
    Script("slot_tensors", (6,)),
    Script("cycle", (7,)),
    Script("sglang_step", (8,), quick=("--seconds", "2")),
    Script("pool_size", (9,)),
    Script("available", (10,)),
    Script("start_up", (11,)),
    Script("bystander", (12,)),
    Script("group_overhead", (), quick=()),
)

GOALS = sorted({goal for script in SCRIPTS for goal in script.goals})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one script: its figures, or why there are none."""

    figures: tuple[dict[str, Any], ...] = ()
    skipped: str = ""
    failed: str = ""


def main() -> int:
    arguments = _parse()
    if arguments.plots:
        import plots

        plots.main()
        return 0
    outcomes = {}
    for script in SCRIPTS:
        if arguments.goal and not set(script.goals) & set(arguments.goal):
            continue
        say(f"{script.name} …")
        outcomes[script.name] = run(script, quick=arguments.quick)
    figures = [
        figure
        for outcome in outcomes.values()
        for figure in outcome.figures
        if not arguments.goal or figure["goal"] in arguments.goal
    ]
    if arguments.as_json:
        # What belongs to no numbered goal is for people.
        print(json.dumps([figure for figure in figures if type(figure["goal"]) is int], ensure_ascii=False))
    elif arguments.markdown:
        from measuring.drawing import markdown

        print(markdown(figures))
    else:
        from measuring.drawing import draw

        draw(figures, judged=not arguments.quick)
    for name, outcome in outcomes.items():
        if outcome.skipped:
            say(f"skipped {name}: {outcome.skipped}")
        if outcome.failed:
            say(f"FAILED {name}: {outcome.failed}")
    missed = not arguments.quick and not all(figure["met"] for figure in figures)
    return int(missed or any(outcome.failed for outcome in outcomes.values()))


def run(script: Script, *, quick: bool) -> Outcome:
    """Run one script; what it says on stderr is passed on line by line."""
    path = HERE / f"{script.name}.py"
    if not path.exists():
        return Outcome(skipped="this checkout does not have it")
    command = [sys.executable, str(path), *(script.quick if quick else ())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        # Its JSON is less than a pipe holds, and comes at the end.
        last_line = _pass_on(process.stderr)
        said = process.stdout.read()
    if process.returncode == EXIT_SKIPPED:
        return Outcome(skipped=last_line)
    if process.returncode:
        return Outcome(failed=f"exit status {process.returncode}: {last_line}")
    try:
        figures = tuple(json.loads(said))
    except ValueError:
        return Outcome(failed=f"it printed no JSON list: {said[:200]!r}")
    return Outcome(figures) if figures else Outcome(skipped=last_line)


def _pass_on(lines: IO[str]) -> str:
    last = ""
    for line in lines:
        say("  " + line.rstrip("\n"))
        last = line.strip() or last
    return last


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mambapool bench", description=__doc__)
    parser.add_argument("--goal", type=int, action="append", choices=GOALS, metavar="N", help="only this goal")
    parser.add_argument("--quick", action="store_true", help="short, for CI: figures are not judged")
    parser.add_argument("--plots", action="store_true", help="draw the pictures of the README instead")
    parser.add_argument("--markdown", action="store_true", help="print the table of the README")
    parser.add_argument("--json", dest="as_json", action="store_true", help="print the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
