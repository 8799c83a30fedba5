"""Commands whose ``--help`` is their manual page: after the options come examples, exit status and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from mambapool.pool.exits import (
    EXIT_ALREADY_RUNNING,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NOT_REACHABLE,
    EXIT_USAGE,
)

#: What each exit status means, of every command.
EXITS = {
    EXIT_DONE: "done",
    EXIT_FAILED: "failed; the last line on stderr says why",
    EXIT_USAGE: "a flag, a variable or a file that cannot be used",
    EXIT_ALREADY_RUNNING: "another daemon has the directory",
    EXIT_NOT_REACHABLE: "no daemon is ready there, or it does not answer",
}

_VARIABLES = "MAMBAPOOL_ + a flag's name"
_ENVIRONMENT = {
    _VARIABLES: "the same as the flag, which wins; of repeatable ones the values, separated by blanks",
}
_DIRECTORY = {"XDG_RUNTIME_DIR": "where the runtime directory is looked for first, as its mambapool/"}


class Command(click.Command):
    """``examples``: command lines with what they do. ``exits``: the statuses it ends with, or what they mean here."""

    def __init__(
        self,
        *args: Any,
        examples: Sequence[tuple[str, str]] = (),
        exits: Mapping[int, str] | Sequence[int] = (),
        **attributes: Any,
    ) -> None:
        super().__init__(*args, **attributes)
        self.examples = examples
        own = exits if isinstance(exits, Mapping) else {}
        self.exits = {status: own.get(status, EXITS[status]) for status in sorted(exits)}

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            formatter.write_paragraph()
            formatter.write_heading("Examples")
            formatter.write("\n".join(f"  {what}:\n    {line}\n" for line, what in self.examples))
        if self.exits:
            write_section(formatter, "Exit status", {str(status): what for status, what in self.exits.items()})
        flags = {option for parameter in self.params for option in parameter.opts}
        write_section(formatter, "Environment", _ENVIRONMENT | (_DIRECTORY if "--dir" in flags else {}))
        super().format_epilog(ctx, formatter)


def write_section(formatter: click.HelpFormatter, title: str, rows: Mapping[str, str]) -> None:
    with formatter.section(title):
        formatter.write_dl(list(rows.items()))
