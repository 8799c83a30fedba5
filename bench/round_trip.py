"""Goals 1 and 2: a round trip through daemon and client against an echo of the same bytes.

Goal 1 is ``alloc(1)`` that carries a free along, all checks on. Goal 2 is ``alloc_group_begin(n)`` that carries
along the n slots of the window before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from measuring.blocks import Samples, interleave, timed
from measuring.cores import client_core, pinned, server_core
from measuring.figures import Effort, Figure, median_of, run_script, say
from measuring.processes import daemon, yardstick
from yardsticks.clients import echo_call

from mambapool.client import Worker, connect
from mambapool.pool import protocol

SLOTS = 65_536
WARM_UP_COUNT = 4096

#: Against the raw echo and, for one slot, against the multipart echo.
LIMITS = {1: 1.15, 64: 1.45, 512: 1.6}
MULTIPART_LIMIT = 1.05


def measure(effort: Effort) -> list[Figure]:
    figures = []
    for count, limit in LIMITS.items():
        goal = 1 if count == 1 else 2
        runs = [one_run(count, effort) for _ in range(effort.runs)]
        say(f"n={count}, last of {effort.runs} runs")
        for line in runs[-1].lines():
            say("  " + line)
        value = median_of(samples.ratio("mambapool", "echo") for samples in runs)
        what = "alloc(1) with a free" if count == 1 else f"group of {count}"
        figures.append(Figure(goal, f"{what}, × raw echo", value, limit))
        if count == 1:
            value = median_of(samples.ratio("mambapool", "multipart echo") for samples in runs)
            figures.append(Figure(goal, f"{what}, × multipart echo", value, MULTIPART_LIMIT))
    return figures


def one_run(count: int, effort: Effort) -> Samples:
    """Every server anew, all alive, all on the client's core."""
    core = server_core("same")
    with contextlib.ExitStack() as stack:
        stack.enter_context(pinned(client_core()))
        directory = stack.enter_context(daemon(core, "--slots", str(SLOTS)))
        worker = stack.enter_context(connect(directory))
        hand_out_all(worker)
        sizes = message_sizes(worker, count)
        contenders = {"mambapool": timed(allocating(worker, count))}
        for name, server in {
            "echo": "raw_echo",
            "echo again": "raw_echo",
            "multipart echo": "multipart_echo",
        }.items():
            endpoint = stack.enter_context(yardstick(server, core, sizes[1]))
            contenders[name] = timed(echo_call(endpoint, sizes[0]))
        return interleave(contenders, blocks=effort.blocks, calls=effort.calls)


def allocating(worker: Worker, count: int) -> Callable[[], object]:
    """The call that is measured: one message there, one back."""
    allocator = worker.allocator
    if count > 1:
        return lambda: allocator.alloc_group_begin(count)
    # Inside a window whose slots are used up: what is freed there travels with the next message.
    allocator.alloc_group_begin(1)
    last = allocator.alloc(1)

    def call() -> None:
        nonlocal last
        assert last is not None
        allocator.free(last)
        last = allocator.alloc(1)

    return call


def hand_out_all(worker: Worker) -> None:
    """Each slot once, so that its tensor is made: an engine at work has seen all of its slots."""
    for _ in range(SLOTS // WARM_UP_COUNT):
        worker.allocator.alloc_group_begin(WARM_UP_COUNT)
    worker.allocator.alloc_group_end()


def message_sizes(worker: Worker, count: int) -> tuple[int, int]:
    """Bytes of a request and of its reply, of such a call in the middle of the measurement."""
    epoch = 2**47  # a number of 48 bits, of which a new slot table starts at a random one
    ids = 60_000 if count == 1 else bytes(4 * count)
    request = protocol.pack((protocol.ALLOC, worker.session, 2000, epoch, 2000, 2000, count, ids, False))
    reply = protocol.pack((2000, epoch, protocol.OK, ids))
    return len(request), len(reply)


if __name__ == "__main__":
    run_script(measure, __doc__)
