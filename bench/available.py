"""Goal 10: ``available_size()``, read from the slot table, against a message; and torn reads against a busy writer.

The message is a raw echo of 16 bytes: no question and answer can be faster. A read is torn when its two words, what is
applied for the writer and the free count, are of different moments: the writer, on a core of its own, gives back and
allocates in one message, and how many depends on the message's number.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from measuring.bare_session import BareSession
from measuring.blocks import Runs, Samples, interleave, timed
from measuring.cores import client_core, pinned, server_core
from measuring.crews import Crew
from measuring.figures import Effort, Figure, run_script, say
from measuring.processes import daemon, yardstick
from yardsticks.clients import echo_call

from mambapool.client import connect
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.pool.slot_table import SlotTableReader

SLOTS = 1024
READS = 100
LIMIT = 300

ECHO_BYTES = 16

#: The writer's k-th message leaves it with 1 + k % WRITER_CYCLE slots.
WRITER_CYCLE = 23


def measure(effort: Effort) -> list[Figure]:
    torn, reads = torn_reads(0.5 if effort.quick else 5.0)
    say(f"{reads} consistent reads next to a busy writer, {torn} torn")
    runs = Runs(f"{READS} × available_size(), and one message", one_run, effort)
    faster = READS * runs.ratio("message", "available_size")
    return [
        Figure(10, "a message, × available_size()", faster, LIMIT, "higher"),
        Figure(10, "torn reads against a busy writer", torn, 0),
    ]


def one_run(effort: Effort) -> Samples:
    with contextlib.ExitStack() as stack:
        stack.enter_context(pinned(client_core()))
        directory = stack.enter_context(daemon(server_core("same"), "--slots", str(SLOTS)))
        worker = stack.enter_context(connect(directory))
        echo = stack.enter_context(yardstick("raw_echo", server_core("same"), ECHO_BYTES))
        available_size = worker.allocator.available_size

        def look() -> None:
            for _ in range(READS):
                available_size()

        contenders = {"available_size": timed(look), "message": timed(echo_call(echo, ECHO_BYTES))}
        return interleave(contenders, effort)


def torn_reads(seconds: float) -> tuple[int, int]:
    """How many, of how many."""
    other = server_core("diff")
    with (
        daemon(other, "--slots", str(SLOTS)) as directory,
        Crew(1, lambda: writing(directory), other) as writer,
        pinned(client_core()),
    ):
        table = SlotTableReader(RuntimeDir(directory).slot_table("default"))
        row = 0  # the only session
        writer.start(seconds)
        torn = reads = 0
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for _ in range(100):
                applied, free = table.applied_and_free(row)
                torn += free != SLOTS - held_after(applied)
            reads += 100
        say(f"the writer changed {writer.rate():.0f} times a second")
    return torn, reads


def writing(directory: Path) -> Callable[[], object]:
    session = BareSession(directory)
    held = session.swap(held_after(0), None)

    def call() -> None:
        nonlocal held
        held = session.swap(held_after(session.posted + 1), held)

    return call


def held_after(applied: int) -> int:
    return 1 + applied % WRITER_CYCLE


if __name__ == "__main__":
    run_script(measure, __doc__)
