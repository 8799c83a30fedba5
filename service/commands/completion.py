"""``mambapool completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from mambapool.pool.errors import ConfigError
from mambapool.pool.exits import EXIT_DONE, EXIT_USAGE
from mambapool.service.commands.manual import Command

SHELLS = ("bash", "zsh", "fish")

#: The program that the shell completes, and the variable by which its script asks it.
PROGRAM = "mambapool"
VARIABLE = "_MAMBAPOOL_COMPLETE"


@click.command(
    cls=Command,
    short_help="Print what makes a shell complete commands and flags.",
    examples=[
        ('eval "$(mambapool completion bash)"', "for this shell; in ~/.bashrc for every one (bash 4.4 or later)"),
        ('eval "$(mambapool completion zsh)"', "in ~/.zshrc, after compinit"),
        ("mambapool completion fish > ~/.config/fish/completions/mambapool.fish", "for fish, once"),
    ],
    exits=[EXIT_DONE, EXIT_USAGE],
)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that makes SHELL complete the commands of mambapool, their flags and files."""
    kind = get_completion_class(shell)
    if kind is None:
        raise ConfigError(f"this version of click has no completion for {shell}")
    root = click.get_current_context().find_root().command
    click.echo(kind(root, {}, PROGRAM, VARIABLE).source())
