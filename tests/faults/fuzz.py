"""The fuzz: ``python tests/faults/fuzz.py --seconds 30 --messages 100000 --seed 1``.

A real daemon, and beside it hostile peers: two with sessions of their own that send nearly right messages, one
without, garbage that is not even ZeroMQ, clients that never read, that come and vanish, that want everything. A
neighbour in a pool of its own works all the time and counts. A part of the time goes to files: ``config.json``,
TOML, traces.

The last line is JSON: ``{"seconds", "messages", "replies", "files", "serving", "growth_bytes", "clean"}``. Exit
status 1 when the daemon did not serve on, grew by 5 MB, lost a slot or crashed, which the lines before name.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from daemons import start_daemon
from fuzzing import MessageFuzzer
from fuzzing_files import fuzz_files
from hostile_peers import ANSWER_S, SLOTS, Neighbour, Peer, send_garbage, vanish
from soaking import RawSession, audit

from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.service.options import parse_duration

MOST_GROWTH_BYTES = 5_000_000
#: Of the messages asked for, before the memory is looked at first: buffers have their size then.
WARM_UP = 0.1
#: Of so many messages some at least have to get so far that these are the answers.
ENOUGH = 50_000
EXPECTED = {
    protocol.OK,
    protocol.NONE,
    protocol.GAP,
    protocol.DOUBLE_FREE,
    protocol.NOT_HOLDER,
    protocol.MALFORMED,
}
EXPECTED |= {protocol.SLOT_OUT_OF_RANGE, protocol.DUPLICATE_SLOT, protocol.NOT_OPEN, protocol.WRONG_EPOCH}
FILES_PART = 0.1
MOST_FILES_S = 30.0


class Fuzz:
    """One run in a directory of its own."""

    def __init__(self, parent: Path, seed: int) -> None:
        self._chance = random.Random(seed)
        self._daemon = start_daemon(parent / "run", slots=SLOTS)
        self._pid = self._daemon.allocator_pid
        fuzzer = MessageFuzzer(self._chance)
        self._peers = [Peer(self._daemon, fuzzer, self._chance) for _ in range(3)]
        for peer in self._peers[:2]:
            peer.attach()
        self._neighbour = Neighbour(self._daemon.dir)
        self._table = st.SlotTableReader(self._daemon.directory.slot_table("default"))
        self.growth_bytes = 0
        self.replies = 0

    @property
    def messages(self) -> int:
        return sum(peer.sent for peer in self._peers)

    def run(self, seconds: float, messages: int) -> None:
        """For so long, and at least so many messages."""
        started, before = time.monotonic(), 0
        while (lasted := time.monotonic() - started) < seconds or self.messages < messages:
            self._turn()
            if not before and (self.messages > WARM_UP * messages and lasted > WARM_UP * seconds):
                before = memory_bytes(self._pid)
        self.growth_bytes = memory_bytes(self._pid) - before
        self.replies = sum(peer.replies for peer in self._peers)

    def finish(self) -> None:
        """The hostile ones leave; the same allocator serves, and every slot is there."""
        self._neighbour.close()
        for peer in self._peers:
            peer.close()
        session = RawSession(self._daemon.dir)
        session.hello()
        deadline = time.monotonic() + ANSWER_S
        while (reply := session.ask(protocol.ALLOC, SLOTS, None, False))[0] != protocol.OK:
            assert time.monotonic() < deadline, f"slots are missing: {self._daemon.status()}"
        assert sorted(reply[1]) == list(range(1, SLOTS + 1))
        session.ask(protocol.DETACH)
        session.close()
        self._daemon.check()
        while len(pools := self._daemon.status()["pools"]) > 1:
            assert time.monotonic() < deadline, (
                f"pools are left of sessions that were refused, or have ended: {pools}"
            )
        assert self._daemon.allocator_pid == self._pid, "the allocator was started again"
        assert "Traceback" not in self._daemon.log
        met = sum((peer.statuses for peer in self._peers), Counter[int]())
        missed = EXPECTED - met.keys()
        assert not missed or self.messages < ENOUGH, (
            f"no reply had status {sorted(missed)}: this went not deep enough"
        )

    def close(self) -> None:
        self._daemon.close()

    @property
    def log_tail(self) -> str:
        return self._daemon.log[-4000:]

    def _turn(self) -> None:
        draw = self._chance.random()
        if draw < 0.03:
            send_garbage(self._daemon, self._chance)
        elif draw < 0.05:
            vanish(self._daemon, self._chance)
        else:
            peer = self._chance.choice(self._peers)
            peer.target.other = self._chance.choice(self._peers).target.session
            peer.burst([self._neighbour.number])
        self._neighbour.round()
        audit(self._table)


def memory_bytes(pid: int) -> int:
    """What the process has in memory of its own, now: not the slot tables, which are files."""
    match = re.search(r"RssAnon:\s+([0-9]+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def fuzz(seconds: float, messages: int, seed: int) -> int:
    """Run it and print what came out; the exit status."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as parent:
        files = fuzz_files(Path(parent), random.Random(seed), min(seconds * FILES_PART, MOST_FILES_S))
        run = Fuzz(Path(parent), seed)
        wrong: list[str] = []
        try:
            run.run(seconds - min(seconds * FILES_PART, MOST_FILES_S), messages)
            run.finish()
        except AssertionError as error:
            wrong.append(str(error))
            sys.stderr.write(run.log_tail)
        finally:
            log_bytes = len(run._daemon.log)
            run.close()
    grew = run.growth_bytes >= MOST_GROWTH_BYTES
    for line in wrong:
        print(line)
    print(
        f"seed {seed}: {run.messages:,} messages sent, {run.replies:,} answered; the daemon "
        f"{'does not serve' if wrong else 'serves'}, grew by {run.growth_bytes / 1e6:.2f} MB"
        f"{' (5 MB are too many)' if grew else ''}; pool {'not clean' if wrong else 'clean'}; "
        f"{files:,} files; {log_bytes / 1e6:.1f} MB of log"
    )
    summary = {
        "seconds": seconds,
        "messages": run.messages,
        "replies": run.replies,
        "files": files,
        "serving": not wrong,
        "growth_bytes": run.growth_bytes,
        "clean": not wrong,
    }
    print(json.dumps(summary))
    return 1 if wrong or grew else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Send a daemon everything but what it expects; it has to serve on."
    )
    parser.add_argument("--seconds", default="30s", help="how long: a number of seconds, or a duration as 10m")
    parser.add_argument("--messages", type=int, default=0, help="at least so many, however long that takes")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    arguments = parser.parse_args()
    text: str = arguments.seconds
    seconds = float(text) if text.replace(".", "", 1).isdigit() else parse_duration(text)
    return fuzz(seconds, arguments.messages, arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
