"""Asking keepers what they keep: which pools have memory in a runtime directory, and waiting for one's."""

from __future__ import annotations

import os
import re
import time

from mambapool.pool.descriptor import ShardDescriptor
from mambapool.pool.errors import PoolLost
from mambapool.pool.handover import receive_shard
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.service.config import PoolConfig

#: A keeper answers a connection at once; it does nothing else.
KEEPER_TIMEOUT_S = 2.0

#: How often a keeper that is not there yet is asked again.
_AGAIN_S = 0.05

_KEEPER_SOCKET = re.compile(r"keeper-(?P<pool>[a-z0-9_-]{1,32})-(?P<rank>[0-9]+)\.sock")


def describe_shard(
    directory: RuntimeDir, pool: str, rank: int, timeout: float = KEEPER_TIMEOUT_S
) -> ShardDescriptor:
    """What the keeper of a shard says of it; raises what :func:`~mambapool.pool.handover.receive_shard` does."""
    descriptor, fd = receive_shard(directory.keeper_socket(pool, rank), timeout)
    if fd is not None:
        os.close(fd)  # whoever only asks never maps a state
    return descriptor


def kept_pools(directory: RuntimeDir) -> list[PoolConfig]:
    """The pools that have a living keeper here, as one of their keepers describes them."""
    kept: dict[str, PoolConfig] = {}
    for path in sorted(directory.path.glob("keeper-*.sock")):
        match = _KEEPER_SOCKET.fullmatch(path.name)
        if match is None or match["pool"] in kept:
            continue
        try:
            shard = describe_shard(directory, match["pool"], int(match["rank"]))
        except PoolLost as error:
            if isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
                continue  # the keeper was killed, or has ended just now
            raise
        device = "cpu" if shard.cuda is None else "cuda"
        kept[match["pool"]] = PoolConfig(match["pool"], shard.slots, shard.geometry, shard.tp_size, device)
    return list(kept.values())


def wait_for_keepers(directory: RuntimeDir, pool: str, timeout: float) -> None:
    """Until every shard of ``pool`` has a keeper that answers; :class:`PoolLost` names one that does not.

    ``timeout`` in seconds bounds the wait: a keeper that was started first may still be clearing its memory.
    """
    deadline = time.monotonic() + timeout
    rank, shards = 0, 1
    while rank < shards:
        try:
            shards = describe_shard(directory, pool, rank).tp_size
        except PoolLost as error:
            if time.monotonic() >= deadline:
                raise PoolLost(f"waited {timeout:g} s for the keepers of pool {pool}: {error}") from error
            time.sleep(_AGAIN_S)
        else:
            rank += 1
