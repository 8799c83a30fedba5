"""``mambapool config``."""

from __future__ import annotations

import json
from typing import Any

import click

from mambapool.pool.exits import EXIT_DONE, EXIT_USAGE
from mambapool.service.commands.manual import Command
from mambapool.service.commands.serving import given_settings, serve_config, serve_options
from mambapool.service.options import dir_option, json_option


@click.group(short_help="Look at settings.")
def config() -> None:
    """Look at settings, and at where they come from."""


@config.command(
    cls=Command,
    short_help="Show each setting, and where it comes from.",
    examples=[
        ("mambapool config show --config pools.toml", "what `serve --config pools.toml` would run"),
        ("MAMBAPOOL_SLOTS=64 mambapool config show --json", "for scripts"),
    ],
    exits=[EXIT_DONE, EXIT_USAGE],
)
@serve_options
@dir_option
@json_option
def show(config: str | None, as_json: bool, **_flags: Any) -> None:
    """Show every setting of `mambapool serve` with its value, and where that comes from.

    Takes the flags of serve, and reads the same variables and the same file: flag > environment > file > default.
    What serve would refuse is refused here, too.
    """
    from mambapool.service.settings import settings

    serve_config()  # which refuses what cannot be
    found = settings(config, given_settings())
    if as_json:
        click.echo(json.dumps([setting.to_json() for setting in found]))
        return
    from mambapool.service.drawing import draw_settings

    draw_settings([(setting.pool, setting.name, setting.value, str(setting.source)) for setting in found])
