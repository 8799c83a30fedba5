"""The soak: ``python tests/faults/soak.py --seconds 30 --seed 1``.

A real daemon, eight clients at random work, half of them with a guarantee, transfers between them, and a killer
that kills -9 one of these nine processes every 100 to 500 ms. Clients stamp the states of their slots and check the
stamps; the slot table is audited all the time; at the end every slot has to be there, once.

The last line is JSON: ``{"seconds", "kills", "lost", "doubled", "recovery_p50_ms", "recovery_p99_ms"}``, where
recovery is from a kill of the allocator to a client's first answered call. Exit status 1 when a slot was lost or
doubled, or anything else went wrong, which the lines before name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from daemons import SMALL_STATE, start_daemon, wait_until
from processes import Child
from soaking import Progress, RawSession, allocator_processes, audit, percentile
from zygote import Zygote

from mambapool.client.operators import ask_status
from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.pool.errors import MambaPoolError
from mambapool.service.options import parse_duration

CLIENT = Path(__file__).with_name("soak_client.py").read_text()

CLIENTS = 8
SLOTS = 96
#: Every other client's. Their sum leaves room for the successors of those whose death nobody has noticed yet.
GUARANTEE = 6
KILL_EVERY_S = (0.1, 0.5)
#: What is not back so long after the last client has ended is lost.
BACK_S = 5.0
LOOK_S = 0.02
END_S = 60.0
#: The parts that the slots of a pool are in, in ``status``.
STATES = ("free", "held", "windows", "offered", "quarantined")


class Soak:
    """One run in a directory of its own."""

    def __init__(self, parent: Path, seed: int) -> None:
        self.dir = parent / "run"
        self.chance = random.Random(seed)
        self.kills = 0
        self.looks = 0
        #: From a kill of the allocator to each client's first answered call, and from the next one's ``ready``.
        self.recoveries_ms: list[float] = []
        self.answers_ms: list[float] = []
        self.wrong: list[str] = []
        #: Place → the epoch that a kill of the allocator ended, and when, in nanoseconds.
        self._waiting: dict[int, tuple[int, int]] = {}
        self._victims: list[int] = []
        self._zygote = Zygote()
        self._daemon = start_daemon(self.dir, slots=SLOTS, states=SMALL_STATE)
        self._table = st.SlotTableReader(self.dir / "default.table")
        self._progress = Progress(parent / "progress", CLIENTS)
        self._faults = parent / "faults.jsonl"
        self._faults.touch()
        self._clients = {place: self._start(place) for place in range(CLIENTS)}

    def run(self, seconds: float) -> None:
        """Kill, audit and measure for so long, from when every client has been answered."""
        wait_until(
            lambda: all(self._progress.epoch_and_time_ns(place)[0] for place in range(CLIENTS)),
            "every client has been answered",
            timeout=END_S,
        )
        end = time.monotonic() + seconds
        next_kill = time.monotonic()
        while (now := time.monotonic()) < end and self._daemon.process.poll() is None:
            if now >= next_kill:
                next_kill = now + self.chance.uniform(*KILL_EVERY_S)
                self._kill(self._next_victim())
            self._look()
            time.sleep(LOOK_S)

    def finish(self) -> set[int]:
        """No more kills: the clients end in order; the slots that are there afterwards."""
        for place, child in self._clients.items():
            self._note_ended(place)
            with contextlib.suppress(BrokenPipeError):
                child.say("end")
        for place, child in self._clients.items():
            if status := child.wait(END_S):
                self.wrong.append(f"client {place} ended with status {status}: {child.stderr}")
        self._daemon.check()
        # Who was killed last may still be ending: its slots come back when its lock is released, or by the sweep.
        deadline = time.monotonic() + BACK_S
        while self._table.free_count < SLOTS and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        session = RawSession(self.dir)
        session.hello()
        reply = session.ask(protocol.ALLOC, SLOTS, None, False)
        while reply[0] == protocol.NONE:  # some are lost: see how many
            reply = session.ask(protocol.ALLOC, self._table.free_count, None, False)
        session.ask(protocol.DETACH)
        session.close()
        assert len(set(reply[1])) == len(reply[1]), f"one answer names a slot twice: {sorted(reply[1])}"
        return set(reply[1])

    def close(self) -> None:
        with contextlib.ExitStack() as all_of_them:
            all_of_them.callback(self._zygote.close)
            all_of_them.callback(self._daemon.close)
            for child in self._clients.values():
                all_of_them.callback(child.close)

    @property
    def log(self) -> str:
        return self._daemon.log

    def faults(self) -> list[dict[str, Any]]:
        """What the clients have told."""
        return [json.loads(line) for line in self._faults.read_text().splitlines()]

    def _start(self, place: int) -> Child:
        guarantee = GUARANTEE if place % 2 else 0
        seed = self.chance.randrange(2**32)
        return Child(self._zygote.start(CLIENT, (self.dir, place, CLIENTS, seed, guarantee), {}))

    def _next_victim(self) -> int:
        """Nobody twice before everybody once: a short run kills the allocator, too."""
        if not self._victims:
            self._victims = self.chance.sample(range(CLIENTS + 1), CLIENTS + 1)
        return self._victims.pop()

    def _kill(self, victim: int) -> None:
        if victim < CLIENTS:
            self._kill_client(victim)
            return
        for pid in allocator_processes(self._daemon.process.pid):
            epoch = self._table.epoch
            os.kill(pid, signal.SIGKILL)
            self.kills += 1
            self._waiting = dict.fromkeys(self._clients, (epoch, time.monotonic_ns()))

    def _kill_client(self, place: int) -> None:
        self._note_ended(place)
        self._clients.pop(place).close()
        self.kills += 1
        self._waiting.pop(place, None)
        self._clients[place] = self._start(place)

    def _note_ended(self, place: int) -> None:
        child = self._clients[place]
        if child.has_said_something():  # a client says nothing: this is its end
            self.wrong.append(f"client {place} ended with status {child.wait()}: {child.stderr}")

    def _look(self) -> None:
        """Audit the table and ``status``; see which clients have been answered after the last restart."""
        try:
            self.looks += audit(self._table)
            pool = ask_status(self._daemon.directory, timeout=0.1)["pools"][0]
            assert sum(pool[state] for state in STATES) == SLOTS, pool
        except AssertionError as error:
            self.wrong.append(f"audit: {error}")
        except MambaPoolError:
            pass  # no allocator at this moment
        for place, (epoch, killed_ns) in list(self._waiting.items()):
            then, answered_ns = self._progress.epoch_and_time_ns(place)
            if then > epoch:
                self.recoveries_ms.append((answered_ns - killed_ns) / 1e6)
                self.answers_ms.append((answered_ns - self._ready_ns()) / 1e6)
                del self._waiting[place]

    def _ready_ns(self) -> int:
        """When the allocator said that it is ready, on the monotonic clock."""
        since = time.time_ns() - self._daemon.directory.ready.stat().st_mtime_ns
        return time.monotonic_ns() - since


def soak(seconds: float, seed: int) -> int:
    """Run it and print what came out; the exit status."""
    with tempfile.TemporaryDirectory(prefix="soak-") as parent:
        run = Soak(Path(parent), seed)
        try:
            run.run(seconds)
            there = run.finish()
            faults = run.faults()
        except BaseException:
            sys.stderr.write(run.log)
            raise
        finally:
            run.close()
    doubled = [fault for fault in faults if "doubled" in fault]
    wrong = [json.dumps(fault) for fault in faults] + run.wrong
    for line in wrong:
        print(line)
    print(
        f"seed {seed}: {run.looks} audits; {len(run.answers_ms)} first answers after a restart, ms: "
        f"p50 {percentile(run.answers_ms, 0.5):.1f}, p99 {percentile(run.answers_ms, 0.99):.1f}"
    )
    summary = {
        "seconds": seconds,
        "kills": run.kills,
        "lost": SLOTS - len(there),
        "doubled": len(doubled),
        "recovery_p50_ms": round(percentile(run.recoveries_ms, 0.5), 1),
        "recovery_p99_ms": round(percentile(run.recoveries_ms, 0.99), 1),
    }
    print(json.dumps(summary))
    return 1 if wrong or summary["lost"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill processes of a working pool, and see that nothing is lost.")
    parser.add_argument("--seconds", default="30s", help="how long: a number of seconds, or a duration as 10m")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    text: str = arguments.seconds
    return soak(float(text) if text.replace(".", "", 1).isdigit() else parse_duration(text), arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
