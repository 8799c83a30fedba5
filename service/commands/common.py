"""What several commands do: find a running daemon, read the flags of a pool, log."""

from __future__ import annotations

import logging

from mambapool.pool.errors import AllocatorUnavailable, ConfigError
from mambapool.pool.runtime_dir import RuntimeDir, candidates
from mambapool.service.config import PoolConfig

LOG_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


def configure_logging() -> None:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)


def one_pool(
    name: str, slots: int | None, model: str | None, states: tuple[str, ...], tp_size: int, device: str
) -> tuple[PoolConfig, ...]:
    """The pool that flags describe; none without --slots."""
    from mambapool.service.config_file import pool_config

    if slots is None:
        if model or states:
            raise ConfigError("--model and --state need --slots N: how many states to keep")
        return ()
    return (pool_config(name, slots, model, states, tp_size, device),)


def running_daemon(named: str | None) -> RuntimeDir:
    """The directory of a daemon that says it is ready."""
    directory = RuntimeDir.for_client(named)
    if directory is None or not directory.has_ready():
        places = [named] if named is not None else [str(place) for place in candidates()]
        raise AllocatorUnavailable(
            f"no daemon is ready in {' or '.join(places)}: start one with `mambapool serve`, or name its --dir"
        )
    directory.check_owner()
    return directory
