"""What a group costs each of its ranks: its calls against those of a session of its own, in the same run.

Prints a JSON list. Starts a daemon in a temporary directory. Figures are ratios of a thread's processor time, each
round's to that of an ungrouped session just before and after it, and the median of the rounds: ranks of one host wait
for each other's cores, which says something about the machine and nothing about the group.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mambapool.client import Worker, connect
from mambapool.client.allocator import SlotAllocator

SLOTS = 1024
GUARANTEE = 256
WORLD_SIZE = 4
ROUNDS = 60
BATCH = 64


def singles(allocator: SlotAllocator) -> None:
    """64 slots one by one, and back."""
    slots = [allocator.alloc(1) for _ in range(BATCH)]
    for slot in slots:
        assert slot is not None
        allocator.free(slot)


def step(allocator: SlotAllocator) -> None:
    """A scheduler's step: a window of 64, all taken, half freed inside, the rest after it."""
    allocator.alloc_group_begin(BATCH)
    slots = [allocator.alloc(1) for _ in range(BATCH)]
    for slot in slots[: BATCH // 2]:
        assert slot is not None
        allocator.free(slot)
    allocator.alloc_group_end()
    rest = slots[BATCH // 2 :]
    for slot in rest:
        assert slot is not None
        allocator.free(slot)


WORK: dict[str, Callable[[SlotAllocator], None]] = {"singles": singles, "step": step}


@dataclass(frozen=True)
class Costs:
    """Medians over the rounds: processor time as a ratio, and messages of one round."""

    first: float
    others: float
    first_messages: float
    others_messages: float


def timed(work: str, worker: Worker) -> tuple[float, int]:
    """Seconds of this thread, and messages."""
    messages = worker.messages
    began = time.thread_time()
    WORK[work](worker.allocator)
    return time.thread_time() - began, worker.messages - messages


def be_a_rank(directory: str, group: str, guarantee: int, work: str, rank: int) -> None:
    """Do the work whenever a line comes, and tell its cost."""
    with connect(
        directory, group=group, rank=rank, world_size=WORLD_SIZE, guarantee=guarantee, timeout=60.0
    ) as worker:
        for _ in sys.stdin:
            print(json.dumps(timed(work, worker)), flush=True)


@contextlib.contextmanager
def other_ranks(*arguments: object) -> Iterator[list[subprocess.Popen[str]]]:
    """All but rank 0, a process each."""
    command = [sys.executable, __file__, *map(str, arguments)]
    started = [
        subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(1, WORLD_SIZE)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.communicate()


def measure(directory: Path, work: str, guarantee: int) -> Costs:
    """Rounds of an ungrouped session and of a group in turn."""
    group = f"bench-{work}-{guarantee}"
    with (
        other_ranks(directory, group, guarantee, work) as others,
        connect(directory, name="alone", guarantee=guarantee, timeout=60.0) as alone,
        connect(directory, group=group, rank=0, world_size=WORLD_SIZE, guarantee=guarantee, timeout=60.0) as first,
    ):
        rounds: list[Costs] = []
        for _ in range(ROUNDS):
            before, _ = timed(work, alone)
            for other in others:
                assert other.stdin is not None
                other.stdin.write("go\n")
                other.stdin.flush()
            mine, messages = timed(work, first)
            told = [_told(other) for other in others]
            after, _ = timed(work, alone)
            base = (before + after) / 2
            theirs = statistics.mean(spent for spent, _ in told)
            rounds.append(Costs(mine / base, theirs / base, messages, max(sent for _, sent in told)))
    rounds = rounds[ROUNDS // 6 :]  # the first ones make tensors
    fields = ("first", "others", "first_messages", "others_messages")
    return Costs(**{field: statistics.median(getattr(costs, field) for costs in rounds) for field in fields})


def _told(other: subprocess.Popen[str]) -> tuple[float, int]:
    assert other.stdout is not None
    spent, messages = json.loads(other.stdout.readline())
    return spent, messages


@contextlib.contextmanager
def daemon() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mambapool-bench-") as place:
        directory = Path(place, "run")
        command = [
            sys.executable,
            "-m",
            "mambapool.service",
            "serve",
            "--dir",
            str(directory),
            "--slots",
            str(SLOTS),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as serve:
            assert serve.stdout is not None
            serve.stdout.readline()
            yield directory
            serve.terminate()


def item(name: str, value: float, limit: float) -> dict[str, object]:
    """A figure, for which lower is better."""
    shown = round(value, 2)
    return {
        "goal": "groups",
        "name": name,
        "value": shown,
        "limit": limit,
        "better": "lower",
        "met": shown <= limit,
    }


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with daemon() as directory:
        guaranteed = measure(directory, "singles", GUARANTEE)
        stepping = measure(directory, "step", 0)
    ranks = f"group of {WORLD_SIZE}"
    items = [
        item(f"{ranks}, guarantee: 64 × alloc(1) and free, per rank, against a session", guaranteed.first, 4.0),
        item(f"{ranks}, guarantee: messages per rank", guaranteed.first_messages, 0),
        item(f"{ranks}: a step of 64 on rank 0, against a session", stepping.first, 2.5),
        item(f"{ranks}: a step of 64 on each other rank, against a session", stepping.others, 4.0),
        item(f"{ranks}: messages of a step, rank 0", stepping.first_messages, 2),
        item(f"{ranks}: messages of a step, each other rank", stepping.others_messages, 0),
    ]
    print(json.dumps(items, indent=1))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        be_a_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
    else:
        main()
