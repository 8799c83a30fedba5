"""Put mambapool's classes where SGLang looks for its own."""

from __future__ import annotations

import importlib
import logging
import os
import sys

from mambapool.pool.errors import ConfigError

_log = logging.getLogger("mambapool.sglang")

#: Whether, and how, :func:`plugin` installs.
SWITCH = "MAMBAPOOL_SGLANG"


def install(*, states: bool = False) -> None:
    """Have SGLang make mambapool's slot allocators from now on; once more does nothing.

    To be called in every scheduler process before its pools are built. With ``states`` its state pools map
    the states of a pool of the daemon (``MAMBAPOOL_POOL``, default ``default``), too.

    Raises ``ImportError`` where there is no SGLang, or one without the classes that 0.5.23 has.
    """
    from mambapool.client.sglang.allocator import MambaSlotAllocator
    from mambapool.client.sglang.streams import SCHEDULER, name_streams_at_start

    module = importlib.import_module("sglang.srt.mem_cache.allocator.mamba")
    try:
        _replace(module.MambaSlotAllocator, MambaSlotAllocator)
    except AttributeError as error:
        raise ImportError(f"this SGLang has no slot allocator to replace: {error}") from error
    if states:
        from mambapool.client.sglang.states import MappedMambaPool

        memory_pool = importlib.import_module("sglang.srt.mem_cache.memory_pool")
        memory_pool.HybridReqToTokenPool.mamba_pool_cls = MappedMambaPool
    # Not imported: a process that has schedulers has it, and in others it would take seconds.
    name_streams_at_start(sys.modules.get(SCHEDULER))
    _log.info("SGLang's slots are mambapool's%s", ", and its states" if states else "")


def plugin() -> None:
    """What SGLang calls in each of its processes (entry point ``sglang.srt.plugins``).

    ``MAMBAPOOL_SGLANG=slots`` installs the allocator, ``states`` the state pool, too; without it this does
    nothing. SGLang goes on when a plugin raises, with its own allocator: who asked for this one is told, by
    the end of the process.
    """
    wanted = os.environ.get(SWITCH, "")
    if not wanted:
        return
    try:
        if wanted not in ("slots", "states"):
            raise ConfigError(f"{SWITCH}={wanted!r}: use slots or states")
        install(states=wanted == "states")
    except Exception as error:
        raise SystemExit(f"mambapool: {error}") from error


def _replace(original: type, replacement: type) -> None:
    """Wherever a module has imported the class by name: ``from … import`` copies it."""
    for module in list(sys.modules.values()):
        # Not getattr: there are modules that import something when they are asked.
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                setattr(module, name, replacement)
