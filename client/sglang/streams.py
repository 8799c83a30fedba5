"""The CUDA streams on which SGLang 0.5.23 writes states: what it has freed goes to others when they are done.

They exist only when the scheduler is complete, after its pools and its CUDA graphs: so they are named at the start of
its event loop. Until then, and where the scheduler is another one, a free is behind the whole context.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mambapool.client.sglang.allocator import fence_streams

_log = logging.getLogger("mambapool.sglang")

#: Where the scheduler's event loop starts, ``managers/scheduler.py``, and what is called there.
SCHEDULER = "sglang.srt.managers.scheduler"
LOOP = "dispatch_event_loop"

#: Attributes of the scheduler. ``forward_stream`` runs the model, also drafts; ``copy_stream`` reads results.
OF_SCHEDULER = ("schedule_stream", "forward_stream", "copy_stream")
#: HiCache moves states from and to the host: of ``tree_cache.cache_controller.l2_transfer_engine``.
OF_HICACHE = ("device_to_host_stream", "host_to_device_stream")


def streams_of(scheduler: Any) -> list[Any]:
    """Those that this scheduler has; HiCache's only if it is enabled. Empty for one that is not on CUDA."""
    engine = scheduler
    for name in ("tree_cache", "cache_controller", "l2_transfer_engine"):
        engine = getattr(engine, name, None)
    found = [getattr(scheduler, name, None) for name in OF_SCHEDULER]
    found += [getattr(engine, name, None) for name in OF_HICACHE]
    streams = [stream for stream in found if stream is not None and hasattr(stream, "cuda_stream")]
    return list({stream.cuda_stream: stream for stream in streams}.values())


def name_streams_at_start(module: ModuleType | None) -> None:
    """Have the scheduler of that module name its streams when its event loop starts; once more does nothing."""
    loop: Callable[[Any], Any] | None = getattr(module, LOOP, None)
    if loop is None or hasattr(loop, "_of_mambapool"):
        return

    @functools.wraps(loop)
    def named(scheduler: Any) -> Any:
        # Only with these two is it known that nothing else of the scheduler writes.
        if all(hasattr(getattr(scheduler, name, None), "cuda_stream") for name in OF_SCHEDULER[:2]):
            streams = streams_of(scheduler)
            fence_streams(streams)
            _log.info("what SGLang frees is behind %d streams", len(streams))
        return loop(scheduler)

    named._of_mambapool = True  # type: ignore[attr-defined]
    setattr(module, LOOP, named)
