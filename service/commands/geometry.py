"""``mambapool geometry``."""

from __future__ import annotations

import json

import click

from mambapool.pool.exits import EXIT_DONE, EXIT_USAGE
from mambapool.service.commands.manual import Command
from mambapool.service.options import SIZE, file_completion, json_option, option


@click.command(
    cls=Command,
    short_help="Show the state of a model, and how many slots fit.",
    examples=[
        ("mambapool geometry --model Qwen3-Next-80B-A3B", "one rank's tensors, and bytes per slot"),
        ("mambapool geometry --model config.json --tp-size 4 --memory 20GiB", "how many slots fit into 20 GiB"),
    ],
    exits=[EXIT_DONE, EXIT_USAGE],
)
@option(
    "--model",
    required=True,
    metavar="CONFIG.json",
    shell_complete=file_completion,
    help="A model's config.json, or its folder.",
)
@option("--tp-size", type=click.IntRange(min=1), default=1, show_default=True, metavar="T", help="Ranks.")
@option("--memory", type=SIZE, metavar="SIZE", help="Say how many slots fit, for example 20GiB.")
@json_option
def geometry(model: str, tp_size: int, memory: int | None, as_json: bool) -> None:
    """Show what one rank keeps per request of a model, and how many slots fit into a memory."""
    from mambapool.pool.models import load_model_config, state_shape

    shape = state_shape(load_model_config(model), tp_size)
    state = shape.geometry()
    result = {
        "layers": shape.layers,
        "conv": [list(dims) for dims in shape.conv],
        "ssm": list(shape.temporal),
        "conv_dtype": shape.conv_dtype,
        "ssm_dtype": shape.temporal_dtype,
        "bytes_per_slot": state.bytes_per_slot,
        "slots": None if memory is None else state.slots_that_fit(memory),
    }
    if as_json:
        click.echo(json.dumps(result))
        return
    from mambapool.service.drawing import draw_geometry

    draw_geometry(shape.model_type, tp_size, state, memory)
