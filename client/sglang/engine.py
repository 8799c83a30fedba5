"""Which engine this process belongs to: what the environment says, and SGLang itself."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mambapool.client.connecting import connect
from mambapool.pool.errors import ConfigError, GroupBroken, GuaranteeExceeded

if TYPE_CHECKING:
    from mambapool.client.worker import Worker

GROUP = "MAMBAPOOL_GROUP"
RANK = "MAMBAPOOL_RANK"
WORLD_SIZE = "MAMBAPOOL_WORLD_SIZE"
POOL = "MAMBAPOOL_POOL"

#: An engine takes minutes to load its model: the daemon, or an engine that is just ending, may take seconds.
TIMEOUT_S = 30.0
#: How often it is tried again, while an engine that may be ending has what this one needs.
_RETRY_S = 0.2

_log = logging.getLogger("mambapool.client")


@dataclass(frozen=True, slots=True)
class Engine:
    """The processes that make the same calls, one per rank, and which of them this one is."""

    #: Pools of its own are named after it.
    name: str
    rank: int
    world_size: int
    #: Whether somebody named it: only then can its ranks find each other.
    named: bool

    @classmethod
    def of_process(cls) -> Engine:
        """As ``MAMBAPOOL_GROUP``, ``MAMBAPOOL_RANK`` and ``MAMBAPOOL_WORLD_SIZE`` say.

        All processes of a server have one environment: unless that names a rank, SGLang is asked. Without
        ``MAMBAPOOL_GROUP`` a process gets a name that no other process has.
        """
        group = os.environ.get(GROUP, "")
        if RANK in os.environ or WORLD_SIZE in os.environ:
            replica, rank, world_size = "", _number(RANK, 0), _number(WORLD_SIZE, 1)
            if not rank < world_size:
                raise ConfigError(f"{RANK}={rank}: {WORLD_SIZE}={world_size} has ranks 0 to {world_size - 1}")
            if world_size > 1 and not group:
                raise ConfigError(f"{WORLD_SIZE}={world_size} needs {GROUP}, the name that its ranks share")
        else:
            replica, rank, world_size = _place_in_sglang()
        return cls(group + replica if group else _private_name(os.getpid()), rank, world_size, bool(group))

    def attach(self, pool: str, **options: Any) -> Worker:
        """``connect`` to a pool as this rank; as a group's, if the engine has several and a name.

        Tried again for :data:`TIMEOUT_S` while another engine has this one's slots, or its place: it may be the one
        before this, which is just ending.
        """
        if self.named and self.world_size > 1:
            # A pool of the engine's own has its own group, too: one process is in several of them.
            options |= {"group": pool if "create_slots" in options else self.name, "world_size": self.world_size}
        give_up_at = time.monotonic() + TIMEOUT_S
        warned = False
        while True:
            try:
                return connect(pool=pool, name=self.name, timeout=TIMEOUT_S, rank=self.rank, **options)
            except (GuaranteeExceeded, GroupBroken) as error:
                if time.monotonic() >= give_up_at:
                    raise
                if not warned:
                    _log.warning(
                        "%s. Trying again for %g s: it may be an engine that is just ending", error, TIMEOUT_S
                    )
                    warned = True
            time.sleep(_RETRY_S)


@functools.cache
def _private_name(_pid: int) -> str:
    # Not the pid: in containers that share a daemon several processes have the same one.
    return f"sglang-{secrets.token_hex(4)}"


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{variable}={text!r} is not a whole number from 0 upwards")
    return int(text)


def _place_in_sglang() -> tuple[str, int, int]:
    """The replica's ending of the engine's name, rank and world size: ``("", 0, 1)`` when SGLang has none.

    The requests of a scheduler go to the ranks of its attention-TP and attention-CP groups, which therefore
    make the same calls; data-parallel replicas and pipeline stages schedule by themselves.
    """
    context = sys.modules.get("sglang.srt.runtime_context")
    parallel = context.get_parallel() if context is not None else None
    sizes = [_place(parallel, name, 1) for name in ("attn_tp_size", "attn_cp_size")]
    rank = _place(parallel, "attn_cp_rank", 0) * sizes[0] + _place(parallel, "attn_tp_rank", 0)
    replica = ""
    for ending, name in (("dp", "dp_rank"), ("adp", "attn_dp_rank"), ("pp", "pp_rank")):
        if number := _place(parallel, name, 0):
            replica += f"-{ending}{number}"
    return replica, rank, sizes[0] * sizes[1]


def _place(parallel: Any, name: str, default: int) -> int:
    """SGLang raises for what is not set in this process, and has None for "no such dimension"."""
    try:
        return getattr(parallel, name, None) or default
    except (RuntimeError, ValueError):
        return default
