"""Goal 4: how much the daemon takes, against raw echoes of the same bytes.

8 clients in a closed loop, each a process with the real client; and one pipelined generator, which always has 64
requests under way, so that the daemon never waits. Rates of time slices that follow each other are compared.
"""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable
from pathlib import Path

from measuring.bare_session import BareSession
from measuring.cores import client_core, server_core
from measuring.crews import Crew
from measuring.figures import Effort, Figure, run_script, say
from measuring.processes import daemon, yardstick
from measuring.swaps import hand_out_all, message_sizes, swapping_one
from yardsticks.clients import dealer, echo_call
from zmq.backend import Socket

from mambapool.client import connect

SLOTS = 4096
CLIENTS = 8
IN_FLIGHT = 64

CLOSED_LOOP_LIMIT = 0.85
PIPELINED_LIMIT = 0.40

SLICE_S = 0.1


def measure(effort: Effort) -> list[Figure]:
    import torch  # noqa: F401  once, before processes are forked

    slices = 5 if effort.quick else 25
    runs = [one_run(slices) for _ in range(effort.runs)]
    closed, pipelined = (statistics.median(run[kind] for run in runs) for kind in (0, 1))
    return [
        Figure(4, f"{CLIENTS} clients, closed loop, × rate of raw echo", closed, CLOSED_LOOP_LIMIT, "higher"),
        Figure(4, "pipelined generator, × rate of raw echo", pipelined, PIPELINED_LIMIT, "higher"),
    ]


def one_run(slices: int) -> tuple[float, float]:
    core = server_core("same")
    request_bytes, reply_bytes = message_sizes(1)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(daemon(core, "--slots", str(SLOTS)))
        echo = stack.enter_context(yardstick("raw_echo", core, reply_bytes))

        def crew(size: int, make_call: Callable[[], Callable[[], object]]) -> Crew:
            return stack.enter_context(Crew(size, make_call, client_core()))

        clients = crew(CLIENTS, lambda: real_client(directory))
        echo_clients = crew(CLIENTS, lambda: echo_call(echo, request_bytes))
        generator = crew(1, lambda: pipelined_session(directory))
        echo_generator = crew(1, lambda: pipelined_echo(echo, request_bytes))
        return (
            compare("closed loop", clients, echo_clients, slices),
            compare("pipelined", generator, echo_generator, slices),
        )


def compare(name: str, ours: Crew, theirs: Crew, slices: int) -> float:
    """The median of the ratios of rates; slice by slice, in random order."""
    chance = random.Random(1)
    rates: dict[Crew, list[float]] = {ours: [], theirs: []}
    for _ in range(slices):
        for crew in chance.sample([ours, theirs], 2):
            crew.start(SLICE_S)
            rates[crew].append(crew.rate())
    mine, theirs_rate = (statistics.median(rates[crew]) for crew in (ours, theirs))
    say(f"{name:12} mambapool {mine:9.0f} calls/s   yardstick {theirs_rate:9.0f} calls/s")
    return statistics.median(a / b for a, b in zip(rates[ours], rates[theirs], strict=True))


def real_client(directory: Path) -> Callable[[], object]:
    worker = connect(directory)
    hand_out_all(worker)
    return swapping_one(worker)


def pipelined_session(directory: Path) -> Callable[[], object]:
    """Each call takes one reply and sends the next request, which gives that slot back."""
    session = BareSession(directory)
    for _ in range(IN_FLIGHT):
        session.send_swap(1, None, open_requests=IN_FLIGHT)

    def call() -> None:
        session.send_swap(1, session.receive_ids(), open_requests=IN_FLIGHT)

    return call


def pipelined_echo(endpoint: str, request_bytes: int) -> Callable[[], object]:
    socket = dealer(endpoint)
    request = bytes(request_bytes)
    for _ in range(IN_FLIGHT):
        Socket.send(socket, request)

    def call() -> None:
        Socket.recv(socket)
        Socket.send(socket, request)

    return call


if __name__ == "__main__":
    run_script(measure, __doc__)
