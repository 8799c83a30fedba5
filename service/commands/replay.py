"""``mambapool replay``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mambapool.pool.errors import ConfigError
from mambapool.pool.exits import EXIT_DONE, EXIT_FAILED, EXIT_NOT_REACHABLE, EXIT_USAGE
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.service.commands.common import running_daemon
from mambapool.service.commands.manual import Command
from mambapool.service.options import TIMEOUT, dir_option, json_option, option

if TYPE_CHECKING:
    from mambapool.service.cli import Client


@click.command(
    cls=Command,
    short_help="Run schedulers over a request trace, check every state.",
    examples=[
        (
            "mambapool replay bench/traces/mooncake_conversation_trace.jsonl.gz --limit 2000",
            "four schedulers, one pool",
        ),
        ("mambapool replay trace.csv --elsewhere --schedulers 2", "the schedulers are in containers of their own"),
        ("mambapool replay chat.csv code.jsonl --plot occupancy.png", "a scheduler for each trace, and a picture"),
    ],
    exits={
        EXIT_DONE: "every request was served, and found in its slots what it had put there",
        EXIT_FAILED: "a state was not its own, a request was not finished, or a scheduler died",
        EXIT_USAGE: "a flag, a variable or a trace that cannot be used",
        EXIT_NOT_REACHABLE: "no daemon is ready there, or it does not answer",
    },
)
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@dir_option
@option("--pool", default="default", show_default=True, metavar="NAME", help="Pool to replay on.")
@option(
    "--schedulers", type=int, metavar="M", help="Scheduler processes.  [default: 4; of several traces, each one]"
)
@option("--track", type=int, default=2, show_default=True, metavar="K", help="Further slots per request.")
@option("--step-ms", type=float, default=30.0, show_default=True, metavar="MS", help="Length of a step.")
@option("--speed", type=float, metavar="S", help="Hold to S × real time; default: as fast as it can.")
@option("--route", default="rr", show_default=True, metavar="HOW", help="rr: in turn; prefix: by first blocks.")
@option("--limit", type=int, metavar="N", help="Only the first N requests, of each trace.")
@option("--tp-size", type=int, default=1, show_default=True, metavar="T", help="Ranks of each scheduler.")
@option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where slot tensors are; the states are where the pool has them.",
)
@option("--guarantee", type=int, default=0, show_default=True, metavar="G", help="Slots granted to each whole.")
@option("--elsewhere", is_flag=True, help="Start none: wait until M times T `mambapool scheduler` have joined.")
@option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE.png",
    help="Draw who held how many slots when, and who waited; also .svg, .pdf. Needs mambapool[plot].",
)
@option("--timeout", type=TIMEOUT, default="5s", show_default=True, metavar="T", help="Wait for an answer.")
@json_option
@click.pass_obj
def replay(
    client: Client,
    traces: tuple[Path, ...],
    directory: str | None,
    pool: str,
    schedulers: int | None,
    track: int,
    step_ms: float,
    speed: float | None,
    route: str,
    limit: int | None,
    tp_size: int,
    device: str,
    guarantee: int,
    elsewhere: bool,
    plot: Path | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Run schedulers over a public request trace, each step as an engine does it, and check every state.

    TRACE is a Mooncake JSONL file or an Azure CSV file, plain or .gz. Of one trace all schedulers serve a share; of
    several each has its own. Needs a running daemon whose pool has states, and torch.
    """
    from mambapool.service.drawing import draw_summary, progress_bar

    place = running_daemon(directory)
    options = client.replay_options(
        trace=traces[0],
        more_traces=traces[1:],
        dir=place.path,
        pool=pool,
        schedulers=schedulers if schedulers is not None else _schedulers_for(traces),
        track=track,
        step_ms=step_ms,
        speed=speed,
        route=route,
        limit=limit,
        timeout=timeout,
        tp_size=tp_size,
        device=device,
        guarantee=guarantee,
        elsewhere=elsewhere,
    )
    if plot is not None:
        client.check_plot(plot)
    _check_states(client, place, pool, timeout, tp_size)
    with progress_bar("requests") as progress:
        summary = client.run_replay(options, progress, plot)
    if as_json:
        click.echo(json.dumps(summary.to_json()))
    else:
        draw_summary(summary)
    if not summary.ok:
        sys.exit(EXIT_FAILED)


def _schedulers_for(traces: tuple[Path, ...]) -> int:
    return len(traces) if len(traces) > 1 else 4


def _check_states(client: Client, directory: RuntimeDir, pool: str, timeout: float, tp_size: int) -> None:
    """Before every scheduler imports torch: the pool is there, and has states."""
    pools = {known["name"]: known for known in client.ask_status(directory, timeout)["pools"]}
    if pool not in pools:
        raise ConfigError(f"--pool {pool}: there is no such pool; pools here: {', '.join(pools) or 'none'}")
    shards = pools[pool]["shards"]
    if not shards:
        raise ConfigError(
            f"--pool {pool} is allocator-only; replay needs states: serve it with --state or --model"
        )
    if tp_size not in (1, shards):
        raise ConfigError(f"--tp-size {tp_size}: pool {pool} has {shards} shards: serve it with as many")
