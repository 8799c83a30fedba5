"""What a script of ``bench/`` finds, and how it says so: JSON on stdout, everything for people on stderr."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

#: Exit status of a script that cannot measure here; the reason is its last line on stderr.
EXIT_SKIPPED = 77


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure of a goal. ``better`` says on which side of ``limit`` it has to be."""

    goal: int
    name: str
    value: float
    limit: float
    better: Literal["lower", "higher"] = "lower"

    def to_json(self) -> dict[str, Any]:
        value = round(self.value, 4)
        return {
            "goal": self.goal,
            "name": self.name,
            "value": value,
            "limit": self.limit,
            "better": self.better,
            "met": value <= self.limit if self.better == "lower" else value >= self.limit,
        }


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: ``runs`` times everything anew, each of so many blocks of so many calls."""

    runs: int = 3
    blocks: int = 150
    calls: int = 10

    @property
    def quick(self) -> bool:
        return self.runs == 1


QUICK = Effort(runs=1, blocks=15)


class Skipped(Exception):
    """Raised when this machine cannot measure it; says why."""


def say(*lines: str) -> None:
    """Something for people who watch."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def run_script(measure: Callable[[Effort], list[Figure]], about: str | None) -> None:
    """The main function of a script: measure, print JSON, exit."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short run: the figures are not to be judged")
    arguments = parser.parse_args()
    try:
        figures = measure(QUICK if arguments.quick else Effort())
    except Skipped as reason:
        say(str(reason))
        sys.exit(EXIT_SKIPPED)
    print(json.dumps([figure.to_json() for figure in figures]))
