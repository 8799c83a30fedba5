"""Goals 1 and 2: a round trip through client and daemon against an echo of the same bytes.

Goal 1 is ``alloc(1)`` that carries a free along, all checks on. Goal 2 is ``alloc_group_begin(n)`` that carries
along the n slots of the window before it. ``daemon alone`` is the same with a client that checks and keeps nothing.
"""

from __future__ import annotations

import contextlib

from measuring.bare_session import BareSession
from measuring.blocks import Runs, Samples, interleave, timed
from measuring.cores import client_core, pinned, server_core
from measuring.figures import Effort, Figure, run_script
from measuring.processes import daemon, yardstick
from measuring.swaps import hand_out_all, message_sizes, swapping
from yardsticks.clients import echo_call

from mambapool.client import connect

SLOTS = 65_536

#: Against the raw echo.
LIMITS = {1: 1.15, 64: 1.45, 512: 1.6}
#: Of one slot, against the multipart echo.
MULTIPART_LIMIT = 1.05


def measure(effort: Effort) -> list[Figure]:
    figures = []
    for count, limit in LIMITS.items():
        runs = Runs(f"n={count}", lambda effort, count=count: one_run(count, effort), effort)  # type: ignore[misc]
        if count == 1:
            figures.append(Figure(1, "alloc(1) with a free, × raw echo", runs.ratio("mambapool", "echo"), limit))
            value = runs.ratio("mambapool", "multipart echo")
            figures.append(Figure(1, "alloc(1) with a free, × multipart echo", value, MULTIPART_LIMIT))
        else:
            figures.append(Figure(2, f"group of {count}, × raw echo", runs.ratio("mambapool", "echo"), limit))
    return figures


def one_run(count: int, effort: Effort) -> Samples:
    """Every server anew, all alive, all on the client's core."""
    core = server_core("same")
    request_bytes, reply_bytes = message_sizes(count)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pinned(client_core()))
        directory = stack.enter_context(daemon(core, "--slots", str(SLOTS)))
        worker = stack.enter_context(connect(directory))
        hand_out_all(worker)
        bare = stack.enter_context(BareSession(directory))
        contenders = {"mambapool": swapping(worker, count), "daemon alone": timed(bare.swapping(count))}
        for name, server in ECHOES.items():
            endpoint = stack.enter_context(yardstick(server, core, reply_bytes))
            contenders[name] = timed(echo_call(endpoint, request_bytes))
        return interleave(contenders, effort)


#: The second one shows what equal things differ by here.
ECHOES = {"echo": "raw_echo", "echo again": "raw_echo", "multipart echo": "multipart_echo"}


if __name__ == "__main__":
    run_script(measure, __doc__)
