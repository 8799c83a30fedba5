"""Goal 12: one client's ``alloc(1)`` next to 7 that hammer ``alloc(512)``, to garbage, to a client that never reads.

Slices with and without the others follow each other in random order.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from measuring.bare_session import BareSession
from measuring.blocks import Contender
from measuring.cores import client_core, pinned, server_core
from measuring.crews import Crew
from measuring.figures import Effort, Figure, run_script, say
from measuring.processes import daemon
from measuring.swaps import hand_out_all, swapping
from start_up import rss_mb
from yardsticks.clients import dealer
from zmq.backend import Socket

from mambapool.client import connect
from mambapool.pool.runtime_dir import RuntimeDir

SLOTS = 8192
HAMMERING = 7
HAMMER_COUNT = 512

P99_LIMIT = 3.0
P50_LIMIT = 1.3
RSS_GROWTH_LIMIT_MB = 5.0

SLICE_S = 0.2

#: What garbage and the one that never reads send, per second: ten times what a scheduler does.
NUISANCE_PER_S = 1000


def measure(effort: Effort) -> list[Figure]:
    import torch  # noqa: F401  once, before processes are forked

    slices = 5 if effort.quick else 30
    figures = []
    for name, percent, limit in (
        ("7 hammering alloc(512)", 99, P99_LIMIT),
        ("garbage", 50, P50_LIMIT),
        ("a client that never reads", 50, P50_LIMIT),
    ):
        runs = [one_run(name, percent, slices) for _ in range(effort.runs)]
        ratio, grown = (statistics.median(values) for values in zip(*runs, strict=True))
        figures.append(Figure(12, f"p{percent} of alloc(1) next to {name}, × idle", ratio, limit))
        if name != "7 hammering alloc(512)":
            figures.append(Figure(12, f"memory after {name}, + MB", grown, RSS_GROWTH_LIMIT_MB))
    return figures


def one_run(name: str, percent: int, slices: int) -> tuple[float, float]:
    """The ratio of the percentiles with and without the others, and by how much the allocator has grown."""
    core = server_core("diff")
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(daemon(core, "--slots", str(SLOTS)))
        size, make_call = {
            "7 hammering alloc(512)": (HAMMERING, lambda: hammering(directory)),
            "garbage": (1, lambda: garbage(directory)),
            "a client that never reads": (1, lambda: never_reading(directory)),
        }[name]
        others = stack.enter_context(Crew(size, make_call, core))
        stack.enter_context(pinned(client_core()))
        worker = stack.enter_context(connect(directory))
        hand_out_all(worker)
        pid = json.loads((directory / "ready").read_text())["pid"]
        call = swapping(worker, 1)
        call(100)
        before_mb = rss_mb(pid)
        idle: list[int] = []
        disturbed: list[int] = []
        chance = random.Random(1)
        for _ in range(slices):
            for times in chance.sample([idle, disturbed], 2):
                if times is disturbed:
                    others.start(SLICE_S)
                times += calls_for(SLICE_S, call)
                if times is disturbed:
                    rate = others.rate()
        grown = rss_mb(pid) - before_mb
    at_rest, next_to_them = (statistics.quantiles(times, n=100)[percent - 1] for times in (idle, disturbed))
    say(f"p{percent} idle {at_rest / 1e3:.0f} µs, next to {name} ({rate:.0f}/s) {next_to_them / 1e3:.0f} µs")
    return next_to_them / at_rest, grown


def calls_for(seconds: float, call: Contender) -> list[int]:
    times: list[int] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        times += call(10)
    return times


def hammering(directory: Path) -> Callable[[], object]:
    worker = connect(directory)
    hand_out_all(worker)
    allocator = worker.allocator

    def call() -> None:
        slots = allocator.alloc(HAMMER_COUNT)
        assert slots is not None
        allocator.free(slots)

    return call


def garbage(directory: Path) -> Callable[[], object]:
    """Random bytes, of any length up to a page; replies are read."""
    socket = dealer(RuntimeDir(directory).endpoint)
    chance = random.Random(1)

    def send() -> None:
        Socket.send(socket, chance.randbytes(chance.randrange(4096)))
        Socket.recv(socket)

    return paced(send)


def never_reading(directory: Path) -> Callable[[], object]:
    """A session whose requests are answered, and that takes no answer."""
    session = BareSession(directory)
    return paced(lambda: session.send_swap(1, None))


def paced(send: Callable[[], object]) -> Callable[[], object]:
    """So many a second, evenly."""

    def call() -> None:
        send()
        time.sleep(1 / NUISANCE_PER_S)

    return call


if __name__ == "__main__":
    run_script(measure, __doc__)
