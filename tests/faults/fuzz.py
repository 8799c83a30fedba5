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
import contextlib
import json
import os
import random
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import zmq

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from daemons import Daemon, start_daemon
from fuzzing import MessageFuzzer, Target, check_reply, is_allowed
from fuzzing_files import fuzz_files
from soaking import RawSession, audit

from mambapool.client.lease import Lease
from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.pool.protocol import pack
from mambapool.service.options import parse_duration

SLOTS = 32
NEIGHBOUR_SLOTS = 16
BURST = 250
#: So many of a session's messages go out before its state is looked at again.
FEW = 8
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
ANSWER_S = 20.0


class Peer:
    """Sends bursts of bad messages; everything that can be answered is, and in time."""

    def __init__(self, daemon: Daemon, fuzzer: MessageFuzzer, chance: random.Random) -> None:
        self._daemon = daemon
        self._fuzzer = fuzzer
        self._chance = chance
        self._context = zmq.Context()
        self._lease = Lease(daemon.directory)
        self._table = st.SlotTableReader(daemon.directory.slot_table("default"))
        self._row = 0
        self._fence = 2**40
        self._connect()
        self.target = Target(0, 0, SLOTS, self._lease.name, self._applied)
        self.attached = False
        self.sent = 0
        self.replies = 0
        self.statuses: Counter[int] = Counter()

    def attach(self) -> None:
        """A session of its own; again after it was left or evicted, or the connection was cut."""
        self.attached = True
        hello = {"versions": [1, 1], "lease": self._lease.name, "pool": "default", "name": "hostile", "pid": 1}
        for fields in self._ask(pack((protocol.HELLO, 0, 1, 0, 0, 0, {**hello, "rank": 0, "guarantee": 0}))):
            session = fields[3] if fields[2] == protocol.OK and len(fields) == 4 else None
            if isinstance(session, dict) and session.get("table") == "default.table":
                self.target.session, self.target.epoch = session["session"], fields[1]
                self._row = session["row"]

    def burst(self, protected: list[int]) -> None:
        """Without a session many at once; with one few, for most depend on what became of those before."""
        for _ in range(1 if not self.attached else BURST // FEW):
            self._send_some(protected, FEW if self.attached else BURST)

    def _send_some(self, protected: list[int], count: int) -> None:
        target = self.target if self.attached else None
        if target is not None and self._table.session_number(self._row) != target.session:
            self.attach()
        bodies = (self._fuzzer.body(target) for _ in range(count))
        allowed = [body for body in bodies if is_allowed(body, protected)]
        if self._chance.random() < 0.001:
            allowed.append(bytes(self._chance.choice((70_000, 1 << 20, 5 << 20))))
        self.sent += len(allowed)
        answers = self._ask(*allowed)
        self.replies += len(answers)
        for fields in answers:
            self.statuses[int(fields[2])] += 1
        if target is not None and any(fields[2] == protocol.UNKNOWN_SESSION for fields in answers):
            self.attach()

    def close(self) -> None:
        self._lease.close()
        self._dealer.close(linger=0)
        self._context.term()

    def _ask(self, *bodies: bytes) -> list[list[Any]]:
        """What comes back up to the answer to a STATUS; asked again when the daemon has cut the connection."""
        for body in bodies:
            self._dealer.send(body)
        found: list[list[Any]] = []
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            self._fence += 1
            self._dealer.send(pack((protocol.STATUS, 0, self._fence, 0, 0, 0)))
            with contextlib.suppress(zmq.Again):
                while True:
                    fields = check_reply(self._dealer.recv())
                    if fields[0] == self._fence:
                        assert fields[2] == protocol.OK, fields
                        return found
                    found.append(fields)
        raise AssertionError(f"the daemon did not answer a STATUS within {ANSWER_S:g} s")

    def _connect(self) -> None:
        self._dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._dealer.linger = 0
        self._dealer.sndtimeo = int(ANSWER_S * 1000)
        self._dealer.rcvtimeo = 1000
        self._dealer.connect(self._daemon.directory.endpoint)

    def _applied(self) -> int:
        return self._table.items[self._table.layout.session(self._row) + st.S_APPLIED]


class Neighbour:
    """A client as it should be, in a pool of its own; its counts have to be exact all the time."""

    def __init__(self, directory: Path) -> None:
        self._session = RawSession(directory, "neighbour", create_slots=NEIGHBOUR_SLOTS)
        greeting = self._session.hello()
        assert greeting[0] == protocol.OK, greeting
        self.number = self._session.number

    def round(self) -> None:
        all_of_them = self._session.ask(protocol.ALLOC, NEIGHBOUR_SLOTS, None, False)
        assert all_of_them[0] == protocol.OK, all_of_them
        assert sorted(all_of_them[1]) == list(range(1, NEIGHBOUR_SLOTS + 1)), all_of_them
        assert self._session.ask(protocol.ALLOC, 1, None, False) == [protocol.NONE]
        self._session.post(protocol.FREE, all_of_them[1])

    def close(self) -> None:
        assert self._session.ask(protocol.DETACH) == [protocol.OK]
        self._session.close()


def send_garbage(daemon: Daemon, chance: random.Random) -> None:
    """Not even ZeroMQ, or only its beginning; to each of the sockets."""
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL" + bytes(16) + b"\0" + bytes(31)
    for path, kind in (
        (daemon.directory.allocator_socket, socket.SOCK_STREAM),
        (daemon.directory.lease_socket, socket.SOCK_SEQPACKET),
    ):
        with socket.socket(socket.AF_UNIX, kind) as stranger, contextlib.suppress(OSError):
            stranger.settimeout(1.0)
            stranger.connect(str(path))
            stranger.sendall(
                chance.choice((b"", greeting, greeting[:30])) + chance.randbytes(chance.randrange(999))
            )


def vanish(daemon: Daemon, chance: random.Random) -> None:
    """Attach, take everything, leave without a word, or ask a lot and never read."""
    session = RawSession(daemon.dir, "made", create_slots=100)
    if session.hello()[0] == protocol.OK:
        session.send(protocol.ALLOC, 100, None, False)
        for _ in range(chance.choice((0, 0, 1500))):
            session.repeat()
    session.close()


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
