"""``mambapool replay``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from mambapool.pool.errors import ConfigError
from mambapool.pool.exits import EXIT_FAILED
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.service.commands.common import running_daemon
from mambapool.service.options import DURATION, dir_option, json_option, option


@click.command(short_help="Run schedulers over a request trace, check every state.")
@click.argument("trace", type=click.Path(path_type=Path))
@dir_option
@option("--pool", default="default", show_default=True, metavar="NAME", help="Pool to replay on.")
@option("--schedulers", type=int, default=4, show_default=True, metavar="M", help="Scheduler processes.")
@option("--track", type=int, default=2, show_default=True, metavar="K", help="Further slots per request.")
@option("--step-ms", type=float, default=30.0, show_default=True, metavar="MS", help="Length of a step.")
@option("--speed", type=float, metavar="S", help="Hold to S × real time; default: as fast as it can.")
@option("--route", default="rr", show_default=True, metavar="HOW", help="rr: in turn; prefix: by first blocks.")
@option("--limit", type=int, metavar="N", help="Only the first N requests.")
@option(
    "--elsewhere", is_flag=True, help="Start no schedulers: wait until M times `mambapool scheduler` has joined."
)
@option("--timeout", type=DURATION, default="5s", show_default=True, metavar="T", help="Wait for an answer.")
@json_option
def replay(
    trace: Path,
    directory: str | None,
    pool: str,
    schedulers: int,
    track: int,
    step_ms: float,
    speed: float | None,
    route: str,
    limit: int | None,
    elsewhere: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Run schedulers over a public request trace, each step as an engine does it, and check every state.

    TRACE is a Mooncake JSONL file, plain or .gz. Needs a running daemon whose pool has states. Exit
    status 1 when a request found a state that is not its own, or was not finished.
    """
    from mambapool.client.replay.command import run_replay
    from mambapool.client.replay.options import ReplayOptions
    from mambapool.service.drawing import draw_summary, progress_bar

    options = ReplayOptions(
        trace=trace,
        dir=running_daemon(directory).path,
        pool=pool,
        schedulers=schedulers,
        track=track,
        step_ms=step_ms,
        speed=speed,
        route=route,
        limit=limit,
        timeout=timeout,
        elsewhere=elsewhere,
    )
    _check_states(options.dir, pool, timeout)
    with progress_bar("requests") as progress:
        summary = run_replay(options, progress)
    if as_json:
        click.echo(json.dumps(summary.to_json()))
    else:
        draw_summary(summary)
    if not summary.ok:
        sys.exit(EXIT_FAILED)


def _check_states(directory: Any, pool: str, timeout: float) -> None:
    """Before every scheduler imports torch: the pool is there, and has states."""
    from mambapool.client.transport import ask_status

    pools = {known["name"]: known for known in ask_status(RuntimeDir(Path(directory)), timeout)["pools"]}
    if pool not in pools:
        raise ConfigError(f"--pool {pool}: there is no such pool; pools here: {', '.join(pools) or 'none'}")
    if not pools[pool]["shards"]:
        raise ConfigError(
            f"--pool {pool} is allocator-only; replay needs states: serve it with --state or --model"
        )
