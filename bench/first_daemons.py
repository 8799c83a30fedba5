"""Goal 3: against the daemon that one would write first, and against zmq.asyncio on both sides.

The asyncio yardstick is an echo of the same bytes: less work than any allocator has.
"""

from __future__ import annotations

import contextlib

from measuring.blocks import Runs, Samples, interleave, timed
from measuring.cores import client_core, pinned, server_core
from measuring.figures import Effort, Figure, run_script
from measuring.processes import daemon, yardstick
from measuring.swaps import hand_out_all, message_sizes, swapping
from yardsticks.clients import AsyncioEchoClient, naive_call

from mambapool.client import connect

SLOTS = 65_536

#: How many times as long the naive daemon has to take.
NAIVE_LIMITS = {1: 1.3, 512: 2.2}
ASYNCIO_LIMIT = 2.5


def measure(effort: Effort) -> list[Figure]:
    figures = []
    for count, limit in NAIVE_LIMITS.items():
        runs = Runs(f"n={count}", lambda effort, count=count: one_run(count, effort), effort)  # type: ignore[misc]
        value = runs.ratio("naive daemon", "mambapool")
        figures.append(Figure(3, f"naive daemon, n={count}, × mambapool", value, limit, "higher"))
        if count == 1:
            value = runs.ratio("zmq.asyncio", "mambapool")
            figures.append(Figure(3, "zmq.asyncio echo, × mambapool", value, ASYNCIO_LIMIT, "higher"))
    return figures


def one_run(count: int, effort: Effort) -> Samples:
    core = server_core("same")
    request_bytes, reply_bytes = message_sizes(count)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pinned(client_core()))
        directory = stack.enter_context(daemon(core, "--slots", str(SLOTS)))
        worker = stack.enter_context(connect(directory))
        hand_out_all(worker)
        naive = stack.enter_context(yardstick("naive_daemon", core, SLOTS))
        echo = stack.enter_context(yardstick("asyncio_echo", core, reply_bytes))
        asyncio_client = stack.enter_context(contextlib.closing(AsyncioEchoClient(echo, request_bytes)))
        contenders = {
            "mambapool": swapping(worker, count),
            "naive daemon": timed(naive_call(naive, count)),
            "zmq.asyncio": asyncio_client.block,
        }
        return interleave(contenders, effort)


if __name__ == "__main__":
    run_script(measure, __doc__)
