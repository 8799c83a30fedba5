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

#: The scripts, and the goals that each of them measures. A script takes ``--quick``, prints a JSON list, and ends
#: with status ``EXIT_SKIPPED``, and the reason on stderr, where it cannot measure.
SCRIPTS: dict[str, tuple[int, ...]] = {
    "round_trip": (1, 2),
    "first_daemons": (3,),
    "capacity": (4,),
    "inside_window": (5,),
    "slot_tensors": (6,),
    "cycle": (7,),
    "sglang_step": (8,),
    "pool_size": (9,),
    "available": (10,),
    "start_up": (11,),
    "bystander": (12,),
}

GOALS = sorted({goal for goals in SCRIPTS.values() for goal in goals})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one script: its figures, or why there are none."""

    figures: tuple[dict[str, Any], ...] = ()
    skipped: str = ""
    failed: str = ""


def main() -> int:
    arguments = _parse()
    outcomes = {}
    for name, goals in SCRIPTS.items():
        if arguments.goal and not set(goals) & set(arguments.goal):
            continue
        say(f"{name}: goal{'s' if len(goals) > 1 else ''} {' and '.join(map(str, goals))}")
        outcomes[name] = run(name, quick=arguments.quick)
    figures = [
        figure
        for outcome in outcomes.values()
        for figure in outcome.figures
        if not arguments.goal or figure["goal"] in arguments.goal
    ]
    if arguments.as_json:
        print(json.dumps(figures, ensure_ascii=False))
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


def run(name: str, *, quick: bool) -> Outcome:
    """Run one script; what it says on stderr is passed on line by line."""
    script = HERE / f"{name}.py"
    if not script.exists():
        return Outcome(skipped="this checkout does not have it")
    command = [sys.executable, str(script), *(["--quick"] if quick else [])]
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
        return Outcome(tuple(json.loads(said)))
    except ValueError:
        return Outcome(failed=f"it printed no JSON list: {said[:200]!r}")


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
    parser.add_argument("--json", dest="as_json", action="store_true", help="print the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
