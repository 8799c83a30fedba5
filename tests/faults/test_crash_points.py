"""The allocator dies before each store of every kind of change; recovery dies before each of its own stores.

After that the client does what a client does: it says HELLO, sends again what was not applied, and repeats its
request. The answer, the slot table and the free list must be those of a run without any crash.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from crashing import Allocator, Crashed, crash_before, durable, every_line, start
from leases import TestLeases

from mambapool.pool import protocol
from mambapool.pool.protocol import unpack_ids
from mambapool.service.pool_report import check_pool
from mambapool.service.table_writer import SlotTableWriter

#: ``make test`` has of each kind of change no more than so many points, evenly spread: first crashes, and for each of
#: them crashes of its recovery. ``make test-heavy`` has all of both.
MOST_LINES = 100
MOST_AGAIN = 2


@dataclass
class Client:
    """A session as its client sees it: numbers its messages, and can say everything again."""

    allocator: Allocator
    lease: bytes
    guarantee: int = 0
    number: int = 0
    epoch: int = 0
    request: int = 1
    posted: int = 0
    unapplied: list[tuple[int, int, Any]] = field(default_factory=list)

    @property
    def identity(self) -> bytes:
        return b"zmq" + self.lease[:1]

    def hello(self, **more: Any) -> list[Any] | None:
        fields = {
            "versions": [1, 1],
            "lease": self.lease,
            "pool": "default",
            "name": "engine",
            "pid": 1,
            "rank": 0,
            "guarantee": self.guarantee,
            "limit": None,
            "create_slots": None,
            "slots": None,
            "expect": None,
            **more,
        }
        reply = self.allocator.send(self.identity, (protocol.HELLO, 0, 1, 0, 0, 0, fields))
        if reply is not None and reply[2] == protocol.OK:
            self.number, self.epoch = reply[3]["session"], reply[1]
        return reply

    def ask(self, op: int, *arguments: Any, frees: Any = None) -> list[Any] | None:
        """A new request, or with the number of the last one a repeat of it."""
        self.request += 1
        return self.ask_again(op, *arguments)

    def ask_again(self, op: int, *arguments: Any) -> list[Any] | None:
        header = (op, self.number, self.request, self.epoch, self.posted, self.request)
        return self.allocator.send(self.identity, (*header, *arguments))

    def post(self, op: int, argument: Any) -> list[Any] | None:
        self.posted += 1
        self.unapplied.append((self.posted, op, argument))
        return self._send_posted(self.posted, op, argument)

    def _send_posted(self, number: int, op: int, argument: Any) -> list[Any] | None:
        header = (op, self.number, 0, self.epoch, number, 0)
        return self.allocator.send(self.identity, (*header, argument))

    def come_back(self, allocator: Allocator) -> None:
        """What a client does after a restart: HELLO, then everything after the last applied message."""
        self.allocator = allocator
        reply = self.hello()
        if reply is None or reply[2] != protocol.OK:
            return
        for number, op, argument in self.unapplied:
            if number > reply[3]["applied"]:
                self._send_posted(number, op, argument)

    @property
    def said(self) -> tuple[Any, ...]:
        """All that it knows, but for the allocator."""
        return (self.number, self.epoch, self.request, self.posted, self.unapplied)

    def copy(self) -> Client:
        """Of the client alone, its allocator being dead."""
        return replace(self, unapplied=list(self.unapplied))

    def take(self, count: int) -> list[int]:
        reply = self.ask(protocol.ALLOC, count, None, False)
        assert reply is not None
        ids: list[int] = unpack_ids(reply[3]).tolist()
        return ids


@dataclass
class World:
    """Two clients and a history, from which every kind of change is one message away."""

    path: Path
    leases: TestLeases
    a: Client
    b: Client
    held: list[int]

    @classmethod
    def make(cls, directory: Path) -> World:
        leases = TestLeases()
        allocator = start(directory / "default.table", leases)
        a, b = Client(allocator, b"A" * 16), Client(allocator, b"B" * 16)
        a.hello()
        b.hello()
        held = a.take(3)
        b.take(2)
        a.post(protocol.FREE, _ids(held[1]))
        a.request += 1
        return cls(directory / "default.table", leases, a, b, [held[0], held[2]])

    def copy(self, directory: Path) -> World:
        """Everything that outlives the allocator."""
        shutil.copytree(self.path.parent, directory)
        leases = self.leases.copy()
        return World(directory / self.path.name, leases, self.a.copy(), self.b.copy(), list(self.held))

    def remove(self) -> None:
        shutil.rmtree(self.path.parent)

    def digest(self) -> bytes:
        """Of everything that outlives the allocator: worlds with the same one go on alike."""
        state = hashlib.sha256(repr((self.a.said, self.b.said, sorted(self.leases.dead))).encode())
        for path in sorted(self.path.parent.rglob("*")):
            if path.is_file():
                state.update(path.name.encode() + path.read_bytes())
        return state.digest()


def _ids(*slots: int) -> bytes:
    return b"".join(slot.to_bytes(4, "little") for slot in slots)


class Change:
    """One kind of change to the table: how it comes about, and what its client does after a crash."""

    def do(self, world: World) -> list[Any] | None:
        """The first time."""
        raise NotImplementedError

    def say_again(self, world: World) -> list[Any] | None:
        """After a restart, when every client has come back; what was posted was sent again by that."""
        return None


@dataclass
class Ask(Change):
    """A request of client ``who``."""

    who: str
    op: int
    arguments: Callable[[World], tuple[Any, ...]]

    def do(self, world: World) -> list[Any] | None:
        client: Client = getattr(world, self.who)
        return client.ask(self.op, *self.arguments(world))

    def say_again(self, world: World) -> list[Any] | None:
        client: Client = getattr(world, self.who)
        return client.ask_again(self.op, *self.arguments(world))


@dataclass
class Carry(Change):
    """An alloc or begin of client a that carries frees: their number is the next of what is posted."""

    count: int
    frees: Callable[[World], Any]
    op: int = protocol.ALLOC

    def do(self, world: World) -> list[Any] | None:
        world.a.posted += 1
        return world.a.ask(self.op, self.count, self.frees(world), False)

    def say_again(self, world: World) -> list[Any] | None:
        return world.a.ask_again(self.op, self.count, self.frees(world), False)


@dataclass
class Post(Change):
    """A posted message of client a."""

    op: int
    argument: Callable[[World], Any]

    def do(self, world: World) -> list[Any] | None:
        world.a.post(self.op, self.argument(world))
        return None


@dataclass
class Attach(Change):
    """HELLO of a third client."""

    guarantee: int

    def do(self, world: World) -> list[Any] | None:
        return Client(world.a.allocator, b"C" * 16, guarantee=self.guarantee).hello()

    say_again = do


@dataclass
class Die(Change):
    """The end of a client's process, which the watcher notices, or the next allocator."""

    who: str

    def do(self, world: World) -> list[Any] | None:
        client: Client = getattr(world, self.who)
        world.leases.dead.add(client.lease)
        client.allocator.dispatcher.lease_released(client.lease, "a test says so")
        return None


@dataclass
class Join(Change):
    """HELLO of a rank of two, with a guarantee, which rank 0 gets."""

    rank: int

    @property
    def lease(self) -> bytes:
        return b"R%d" % self.rank * 8

    def do(self, world: World) -> list[Any] | None:
        client = Client(world.a.allocator, self.lease, guarantee=3)
        return client.hello(rank=self.rank, group="engine", world_size=2)

    say_again = do


@dataclass
class DieAsRank(Join):
    """The end of that rank's process."""

    def do(self, world: World) -> list[Any] | None:
        world.leases.dead.add(self.lease)
        world.a.allocator.dispatcher.lease_released(self.lease, "a test says so")
        return None

    def say_again(self, world: World) -> list[Any] | None:
        return None


NOTHING: tuple[Change, ...] = ()
RANKS = (Join(0), Join(1))
WINDOW = (Ask("a", protocol.BEGIN, lambda w: (4, None, False)),)
OFFER = (Ask("a", protocol.OFFER, lambda w: (_ids(*w.held), w.b.number)),)
TWO_OFFERS = (
    Ask("a", protocol.OFFER, lambda w: (_ids(*w.held[:2]), w.b.number)),
    Ask("a", protocol.OFFER, lambda w: (_ids(*w.held[2:]), w.b.number)),
)

#: Kind of change → what comes before it, and the change.
CHANGES: dict[str, tuple[tuple[Change, ...], Change]] = {
    "alloc of one": (NOTHING, Ask("a", protocol.ALLOC, lambda w: (1, None, False))),
    "alloc of one that carries a free": (NOTHING, Carry(1, lambda w: w.held[0])),
    "alloc of one that carries several frees": (NOTHING, Carry(1, lambda w: _ids(*w.held))),
    "alloc of several that carries a free": (NOTHING, Carry(5, lambda w: w.held[0])),
    "alloc of several that carries several frees": (NOTHING, Carry(5, lambda w: _ids(*w.held))),
    "begin that carries several frees": (WINDOW, Carry(4, lambda w: _ids(*w.held), protocol.BEGIN)),
    "alloc of several": (NOTHING, Ask("a", protocol.ALLOC, lambda w: (5, None, False))),
    "alloc that is not to be had": (NOTHING, Ask("a", protocol.ALLOC, lambda w: (12, None, False))),
    "free of one": (NOTHING, Post(protocol.FREE, lambda w: w.held[0])),
    "free of several": (NOTHING, Post(protocol.FREE, lambda w: _ids(*w.held))),
    "refused free": (NOTHING, Post(protocol.FREE, lambda w: 11)),
    "begin": (NOTHING, WINDOW[0]),
    "begin inside a window": (WINDOW, Ask("a", protocol.BEGIN, lambda w: (3, None, False))),
    "end with unused slots": (WINDOW, Post(protocol.END, lambda w: _ids(w.held[0], 7, 8))),
    "end of a used window": (WINDOW, Post(protocol.END, lambda w: None)),
    "clear": (WINDOW, Post(protocol.CLEAR, lambda w: None)),
    "cancel of a grant": (WINDOW, Post(protocol.CANCEL, lambda w: w.a.request)),
    "offer": (NOTHING, OFFER[0]),
    "cancel of an offer": (OFFER, Post(protocol.CANCEL, lambda w: w.a.request)),
    "second offer to the same one": (TWO_OFFERS[:1], TWO_OFFERS[1]),
    "accept": (OFFER, Ask("b", protocol.ACCEPT, lambda w: (False,))),
    "accept of the first of two": (TWO_OFFERS, Ask("b", protocol.ACCEPT, lambda w: (False,))),
    "attach": (NOTHING, Attach(0)),
    "attach with a guarantee": (NOTHING, Attach(4)),
    "detach": (WINDOW, Ask("a", protocol.DETACH, lambda w: ())),
    "reclaim of a holder": (WINDOW, Die("a")),
    "reclaim of a giver": (OFFER, Die("a")),
    "reclaim of a receiver": (OFFER, Die("b")),
    "first rank of a group": (NOTHING, Join(0)),
    "last rank of a group": (RANKS[:1], Join(1)),
    "end of a rank": (RANKS, DieAsRank(0)),
    "end of a group": ((*RANKS, DieAsRank(0)), DieAsRank(1)),
}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.heavy)], ids=["", "all points"])
@pytest.mark.parametrize("kind", CHANGES)
def test_a_crash_before_any_store_changes_nothing_that_a_client_sees(
    kind: str, every: bool, tmp_path: Path
) -> None:
    before, change = CHANGES[kind]
    numbers, checked = itertools.count(), itertools.count(1)

    def world() -> World:
        directory = tmp_path / str(next(numbers))
        directory.mkdir()
        made = World.make(directory)
        for earlier in before:
            earlier.do(made)
        return made

    def copy_of(crashed: World) -> World:
        return crashed.copy(tmp_path / str(next(numbers)))

    truth = world()
    expected = _payload(change.do(truth))
    truth_after = durable(truth.path)
    counted = world()
    lines = every_line(lambda: change.do(counted))

    #: States after a crash whose end was looked at, and those of which each crash of the recovery was, too: most
    #: lines store nothing.
    seen: set[bytes] = set()
    recovered_from: set[bytes] = set()

    def same_as_without(crashed: World, where: str) -> None:
        state = crashed.digest()
        if state in seen:
            return crashed.remove()
        seen.add(state)
        allocator = start(crashed.path, crashed.leases)
        for client in (crashed.a, crashed.b):
            client.come_back(allocator)
        answer = _payload(change.say_again(crashed))
        check_pool(allocator.pool)
        assert _same(change, answer, expected), f"{where}: answered {answer}, without a crash {expected}"
        assert durable(crashed.path) == truth_after, where
        crashed.a.ask(protocol.ALLOC, 1, None, False)
        check_pool(allocator.pool)
        crashed.remove()  # thousands of tables and group pages otherwise
        if not next(checked) % 100:
            gc.collect()  # tables of allocators that died are mapped until then, and each mapping is a descriptor
        return None

    for line in _points(lines + 1, lines + 1 if every else MOST_LINES):
        where = f"crash before line {line} of {lines}"
        crashed = world()
        with contextlib.suppress(Crashed), crash_before(line):
            change.do(crashed)
        state = crashed.digest()
        if state in recovered_from:
            crashed.remove()
            continue
        recovered_from.add(state)
        recovered = copy_of(crashed)
        recovery_lines = every_line(functools.partial(start, recovered.path, recovered.leases))
        recovered.remove()
        for again in _points(recovery_lines, recovery_lines if every else MOST_AGAIN, first=line):
            twice = copy_of(crashed)
            with contextlib.suppress(Crashed), crash_before(again):
                start(twice.path, twice.leases)
            same_as_without(twice, f"{where}, then in recovery before {again} of {recovery_lines}")
        same_as_without(crashed, where)


def _points(count: int, most: int, first: int = 0) -> Iterable[int]:
    """All of 0 to ``count`` - 1, or up to ``most`` of them, at even distances."""
    if count <= most:
        return range(count)
    return [(place * count // most + first) % count for place in range(most)]


def test_without_the_redo_record_crashes_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: an allocator whose recovery forgets the record loses or doubles slots."""
    monkeypatch.setattr(SlotTableWriter, "_finish", lambda _table: None)
    with pytest.raises(AssertionError):
        test_a_crash_before_any_store_changes_nothing_that_a_client_sees("alloc of several", False, tmp_path)


def _payload(reply: list[Any] | None) -> list[Any] | None:
    """A reply without its epoch, which a restart raises."""
    if reply is None:
        return None
    if len(reply) > 3 and isinstance(reply[3], dict):
        return [reply[2], {key: reply[3][key] for key in ("session", "applied", "granted") if key in reply[3]}]
    return [reply[0], *reply[2:]]


def _same(change: Change, answer: list[Any] | None, expected: list[Any] | None) -> bool:
    if isinstance(change, Ask) and change.op == protocol.DETACH:
        # A session that has left is not known any more: for its client that is the same.
        return answer is not None and answer[1] in (protocol.OK, protocol.UNKNOWN_SESSION)
    return answer == expected or (not isinstance(change, Ask | Carry | Attach) and type(change) is not Join)
