"""The command line. The composition root: the one place of the service that may import the client, lazily."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from mambapool.pool.errors import AllocatorUnavailable, ConfigError, MambaPoolError
from mambapool.pool.exits import EXIT_FAILED, exit_status
from mambapool.pool.runtime_dir import RuntimeDir, candidates
from mambapool.pool.version import VERSION
from mambapool.service.config import AllocatorConfig, PoolConfig
from mambapool.service.options import (
    DURATION,
    SIZE,
    dir_option,
    json_option,
    option,
    pool_options,
    quarantine_option,
)

LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every flag has an environment variable, MAMBAPOOL_ + its name. Exit status: 0 done, 1 failed, "
    "2 usage, 3 another daemon has the directory, 4 not reachable.",
)
@click.version_option(VERSION, prog_name="mambapool")
def command_line() -> None:
    """Slots of a shared Mamba state pool for many processes.

    One allocator process owns the list of free slots and hands out ids; keepers hold the memory, which every
    worker maps. Start with `mambapool serve`, look with `mambapool status`.
    """


def main() -> None:
    """Run the command line; every expected error is one line on stderr, and an exit status."""
    try:
        # What comes back is the status of --help, --version and Context.exit, None otherwise.
        sys.exit(command_line(prog_name="mambapool", standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except MambaPoolError as error:
        click.echo(f"mambapool: {error}", err=True)
        sys.exit(exit_status(error))
    except ImportError as error:
        if "mambapool[worker]" not in str(error):
            raise
        click.echo(f"mambapool: {error}", err=True)
        sys.exit(EXIT_FAILED)
    except OSError as error:
        click.echo(f"mambapool: {error}", err=True)
        sys.exit(EXIT_FAILED)


@command_line.command(short_help="Run keepers and allocator, until Ctrl-C or SIGTERM.")
@pool_options(
    required_slots=False,
    slots_help="Usable slots; ids are 1..N, row 0 is added. Alone: an allocator-only pool, whose engine keeps "
    "its own tensors.",
)
@option("--max-sessions", type=int, metavar="N", help="Sessions per pool.  [default: 1024]")
@option("--max-waiters", type=int, metavar="N", help="Requests per pool that wait for slots.  [default: 1024]")
@quarantine_option
@option(
    "--config",
    metavar="FILE.toml",
    help="Several pools: [[pool]] tables with the flags' names as keys. Flags change the pool that --pool names, "
    "or the file's only one.",
)
@dir_option
def serve(
    pool: str,
    slots: int | None,
    model: str | None,
    states: tuple[str, ...],
    tp_size: int,
    device: str,
    max_sessions: int | None,
    max_waiters: int | None,
    quarantine: float | None,
    config: str | None,
    directory: str | None,
) -> None:
    """Run keepers and allocator, in the foreground, until Ctrl-C or SIGTERM.

    Prints `mambapool ready …` once it answers. Without --slots it starts without a pool: clients make
    allocator-only ones.

    \b
    mambapool serve --slots 512 --state conv=bfloat16:4x96x3 --state temporal=float32:4x2x16x8
    mambapool serve --slots 256 --model Qwen3-Next-80B-A3B/config.json --tp-size 4
    """
    from mambapool.service.serve import ServeConfig
    from mambapool.service.serve import serve as run

    _configure_logging()
    if config is None:
        pools = _one_pool(pool, slots, model, states, tp_size, device)
    else:
        from mambapool.service.config_file import read_config_file

        settings = read_config_file(config, _given_pool_flags())
        directory = directory if directory is not None else settings.dir
        max_sessions = max_sessions if max_sessions is not None else settings.max_sessions
        max_waiters = max_waiters if max_waiters is not None else settings.max_waiters
        quarantine = quarantine if quarantine is not None else settings.quarantine_s
        pools = settings.pools
    given = {"max_sessions": max_sessions, "max_waiters": max_waiters, "quarantine_s": quarantine}
    limits: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    run(ServeConfig(directory, pools, **limits), _say_ready(pools))


@command_line.command(short_help="Keep one shard's memory alone, until SIGTERM.")
@pool_options(required_slots=True, slots_help="Usable slots; ids are 1..N, row 0 is added.")
@option("--rank", type=click.IntRange(min=0), default=0, show_default=True, metavar="R", help="Whose shard.")
@dir_option
def keeper(
    pool: str,
    slots: int,
    model: str | None,
    states: tuple[str, ...],
    tp_size: int,
    device: str,
    rank: int,
    directory: str | None,
) -> None:
    """Keep one shard's memory alone, until SIGTERM.

    For containers, and for an allocator that is exchanged while the states stay: `mambapool allocator`
    finds the keepers that live in its directory.
    """
    from mambapool.pool.keeper import KeeperConfig, keep

    _configure_logging()
    (config,) = _one_pool(pool, slots, model, states, tp_size, device)
    if config.geometry is None:
        raise ConfigError("a keeper needs --model or --state: it keeps the memory of states")
    place = RuntimeDir.for_server(directory).path
    keep(
        KeeperConfig(place, pool, rank, tp_size, slots, config.geometry, device=device),
        lambda _: click.echo(f"mambapool ready: keeper of {pool}, rank {rank} of {tp_size}, in {place}"),
    )


@command_line.command(short_help="Run the allocator alone, until SIGTERM.")
@option(
    "--pool", default="default", show_default=True, metavar="NAME", help="Name of the pool that --slots makes."
)
@option("--slots", type=int, metavar="N", help="Make an allocator-only pool of N slots.")
@option("--max-sessions", type=int, metavar="N", default=1024, show_default=True, help="Sessions per pool.")
@option("--max-waiters", type=int, metavar="N", default=1024, show_default=True, help="Waiting requests per pool.")
@quarantine_option
@dir_option
def allocator(
    pool: str,
    slots: int | None,
    max_sessions: int,
    max_waiters: int,
    quarantine: float | None,
    directory: str | None,
) -> None:
    """Run the allocator alone, until SIGTERM; it serves the keepers that live in its directory.

    What an allocator before it left there, it takes over: sessions that still live keep their slots.
    """
    from mambapool.service.server import run_allocator

    _configure_logging()
    pools = (PoolConfig(pool, slots),) if slots is not None else ()
    place = RuntimeDir.for_server(directory)
    run_allocator(
        AllocatorConfig(place.path, pools, max_sessions, max_waiters, 1.0 if quarantine is None else quarantine),
        lambda ready: click.echo(f"mambapool ready: pid {ready['pid']}, {ready['endpoint']}"),
    )


@command_line.command(short_help="Show pools, holders and counts of a running daemon.")
@dir_option
@json_option
@option("--timeout", type=DURATION, default="2s", show_default=True, metavar="T", help="Wait so long for it.")
def status(directory: str | None, as_json: bool, timeout: float) -> None:
    """Show pools, holders and counts of a running daemon. Counts are of slots."""
    from mambapool.client.transport import ask_status

    found = ask_status(_running_daemon(directory), timeout)
    if as_json:
        click.echo(json.dumps(found))
        return
    from mambapool.service.drawing import draw_status

    draw_status(found)


@command_line.command(short_help="Look whether mambapool can work on this machine.")
@dir_option
@option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="With cuda it fails where no GPU can be used.",
)
@json_option
def doctor(directory: str | None, device: str, as_json: bool) -> None:
    """Look whether mambapool can work on this machine, and say what to do where it cannot.

    Needs no daemon and no GPU. Exit status 1 if something will not work.
    """
    from mambapool.service.doctor_gpu import look_at_gpus
    from mambapool.service.doctor_host import look_at_host
    from mambapool.service.findings import BAD

    findings = [*look_at_host(directory), *look_at_gpus(wanted=device == "cuda")]
    if as_json:
        click.echo(json.dumps([finding.to_json() for finding in findings]))
    else:
        from mambapool.service.drawing import draw_findings

        draw_findings(findings)
    if any(finding.state == BAD for finding in findings):
        sys.exit(EXIT_FAILED)


@command_line.command(name="evict", short_help="End a session and free its slots.")
@click.argument("holder", type=int)
@click.option("--force", is_flag=True, help="Evict it although its process lives and may still write.")
@dir_option
@json_option
@option("--timeout", type=DURATION, default="2s", show_default=True, metavar="T", help="Wait so long for it.")
def evict_command(holder: int, force: bool, directory: str | None, as_json: bool, timeout: float) -> None:
    """End session number HOLDER (see `mambapool status`) and free what it holds.

    For a process that hangs for good, or one that lives where nobody can end it. Refused while the process
    is alive, unless --force: it may still write to slots that somebody else gets.
    """
    from mambapool.client.transport import evict

    result = evict(_running_daemon(directory), timeout, holder, force=force)
    if result["alive"]:
        click.echo(f"mambapool: warning: session {holder} was alive; its process may still write", err=True)
    if as_json:
        click.echo(json.dumps({"session": holder, **result}))
    else:
        click.echo(f"session {holder} evicted: {result['slots']} slots freed")


@command_line.command(short_help="Show the state of a model, and how many slots fit.")
@option("--model", required=True, metavar="CONFIG.json", help="A model's config.json, or its folder.")
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


@command_line.command(short_help="Run schedulers over a request trace, check every state.")
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
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where slot tensors are; the states are where the pool has them.",
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
    device: str,
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
        dir=_running_daemon(directory).path,
        pool=pool,
        schedulers=schedulers,
        track=track,
        step_ms=step_ms,
        speed=speed,
        route=route,
        limit=limit,
        timeout=timeout,
        device=device,
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


def _configure_logging() -> None:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)


def _given_pool_flags() -> dict[str, Any]:
    """What of a pool was given by flag or environment, with the keys of a configuration file."""
    context = click.get_current_context()
    keys = {"pool": "pool", "slots": "slots", "model": "model", "states": "state", "tp_size": "tp-size"}
    given = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return {
        key: context.params[name]
        for name, key in {**keys, "device": "device"}.items()
        if context.get_parameter_source(name) in given
    }


def _one_pool(
    name: str, slots: int | None, model: str | None, states: tuple[str, ...], tp_size: int, device: str
) -> tuple[PoolConfig, ...]:
    """The pool that flags describe; none without --slots."""
    from mambapool.service.config_file import pool_config

    if slots is None:
        if model or states:
            raise ConfigError("--model and --state need --slots N: how many states to keep")
        return ()
    return (pool_config(name, slots, model, states, tp_size, device),)


def _say_ready(pools: tuple[PoolConfig, ...]) -> Any:
    def say(directory: RuntimeDir, ready: dict[str, Any]) -> None:
        described = ", ".join(_describe(pool) for pool in pools) or "no pool yet"
        click.echo(f"mambapool ready: {directory.path}, pid {ready['pid']}, {described}")

    return say


def _describe(pool: PoolConfig) -> str:
    if pool.geometry is None:
        return f"pool {pool.name}: {pool.slots} slots, allocator-only"
    shards = f" on {pool.shards} shards" if pool.shards > 1 else ""
    return f"pool {pool.name}: {pool.slots} slots of {pool.geometry.bytes_per_slot} bytes{shards}"


def _running_daemon(named: str | None) -> RuntimeDir:
    """The directory of a daemon that says it is ready."""
    directory = RuntimeDir.for_client(named)
    if directory is None or not directory.ready.exists():
        places = [named] if named is not None else [str(place) for place in candidates()]
        raise AllocatorUnavailable(
            f"no daemon is ready in {' or '.join(places)}: start one with `mambapool serve`, or name its --dir"
        )
    directory.check_owner()
    return directory
