"""Goal 4: how much the daemon takes, against raw echoes of the same bytes.

8 clients in a closed loop, each a process with the real client; and one pipelined generator, which always has 64
requests under way, so that the daemon never waits. Rates of time slices that follow each other are compared.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
from collections.abc import Callable, Iterator
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

#: In all slices of a run.
MOST_PIPELINED_CALLS = 1_000_000
#: A refusal says in words what is wrong.
SHORTEST_REFUSAL_BYTES = 40


def measure(effort: Effort) -> list[Figure]:
    import torch  # noqa: F401  once, before processes are forked

    slices = 5 if effort.quick else 25
    closed = statistics.median(closed_loop(slices) for _ in range(effort.runs))
    pipelined = statistics.median(saturated(slices) for _ in range(effort.runs))
    return [
        Figure(4, f"{CLIENTS} clients, closed loop, × rate of raw echo", closed, CLOSED_LOOP_LIMIT, "higher"),
        Figure(4, "pipelined generator, × rate of raw echo", pipelined, PIPELINED_LIMIT, "higher"),
    ]


def closed_loop(slices: int) -> float:
    """All on one core."""
    with servers(server_core("same")) as (directory, echo, request_bytes):
        ours = Crew(CLIENTS, lambda: real_client(directory), client_core())
        theirs = Crew(CLIENTS, lambda: echo_call(echo, request_bytes), client_core())
        with ours, theirs:
            return compare("closed loop", ours, theirs, slices)


def saturated(slices: int) -> float:
    """The servers have a core of their own, and are all that it has to do."""
    with servers(server_core("diff")) as (directory, echo, request_bytes):
        ours = Crew(1, lambda: pipelined_session(directory), client_core())
        theirs = Crew(1, lambda: pipelined_echo(echo, request_bytes), client_core())
        with ours, theirs:
            return compare("pipelined", ours, theirs, slices)


@contextlib.contextmanager
def servers(core: int) -> Iterator[tuple[Path, str, int]]:
    """The daemon's directory, the echo's endpoint, and the bytes of a request."""
    request_bytes, reply_bytes = message_sizes(1)
    with daemon(core, "--slots", str(SLOTS)) as directory, yardstick("raw_echo", core, reply_bytes) as echo:
        yield directory, echo, request_bytes


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
    """Each call takes one reply and sends the next request, which gives that reply's slot back.

    All requests are packed before, so that the generator does no more than that of the echo: first come, first
    served, the k-th request gets slot k, and after the last one the first again.
    """
    session = BareSession(directory)
    for _ in range(IN_FLIGHT):
        session.send_swap(1, None)
    slots = itertools.cycle(range(1, SLOTS + 1))
    bodies = iter(
        [session.packed_swap(1, next(slots), open_requests=IN_FLIGHT) for _ in range(MOST_PIPELINED_CALLS)]
    )
    receive, send = Socket.recv, Socket.send

    def call() -> None:
        reply = receive(session.socket)
        assert len(reply) < SHORTEST_REFUSAL_BYTES, reply
        send(session.socket, next(bodies))

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
