"""Every verb × kill -9 of the client, of the allocator, of both × before and after sending, before and after the reply.

All verbs are brought to the same point at once, each in a pool of its own with a witness, a session that survives.
The allocator is stopped where it must not read yet; a reply that is not taken is lost with its connection.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from daemons import Daemon, wait_until
from leased_clients import successor_of
from processes import Child, Children
from soaking import RawSession, RemoteSession, applied, audit, holders, sessions

from mambapool.pool import protocol
from mambapool.pool import slot_table as st
from mambapool.pool.protocol import OK
from mambapool.service.serve import SHORT_LIFE_S

SLOTS = 12
#: What each witness holds throughout.
WITNESSED = 3

POINTS = ("before send", "after send", "before reply", "after reply")


@dataclass
class Scene:
    """One verb at one point: a client that is about to use it, and a witness in the same pool."""

    name: str
    verb: Verb
    client: RemoteSession
    witness: RawSession
    table: st.SlotTableReader
    number: int = 0
    #: What the witness holds.
    own: list[int] = field(default_factory=list)
    #: What the client holds before the verb.
    held: list[int] = field(default_factory=list)
    posted: int = 0

    def ask(self, op: int, *arguments: Any) -> Any:
        return self.client.do("ask", op, *arguments)

    def post(self, op: int, argument: Any) -> None:
        self.client.do("post", op, argument)
        self.posted += 1

    def take(self, count: int) -> None:
        self.held += self.ask(protocol.ALLOC, count, None, False)[1]

    def open_window(self, count: int) -> None:
        self.held += self.ask(protocol.BEGIN, count, None, False)[1]

    def arrived(self) -> bool:
        """Whether the verb was applied, and its reply, if it has one, waits to be taken."""
        if self.verb.posted:
            return applied(self.table, self.number) == self.posted
        answered: bool = self.client.do("arrived")
        return answered

    def client_holds(self) -> int:
        return holders(self.table).count(self.number) if self.number else 0


def _nothing(_scene: Scene) -> None:
    pass


@dataclass(frozen=True)
class Verb:
    """What leads up to it, how it is sent, and what its client holds and hears when it was applied."""

    send: Callable[[Scene], None]
    holds: int
    prepare: Callable[[Scene], None] = _nothing
    attached: bool = True
    guarantee: int = 0
    posted: bool = False
    #: For one that waits: what the witness does, so that it is answered.
    let: Callable[[Scene], None] = _nothing
    detaches: bool = False
    #: Slots that its answer has.
    answers: int = 0


def _offer_to_client(scene: Scene) -> None:
    slots = scene.witness.ask(protocol.ALLOC, 2, None, False)[1]
    scene.own += slots
    assert scene.witness.ask(protocol.OFFER, slots, scene.number) == [OK]


def _fill(scene: Scene) -> None:
    scene.own += scene.witness.ask(protocol.ALLOC, SLOTS - WITNESSED - 2, None, False)[1]


def _make_room(scene: Scene) -> None:
    scene.own, slots = scene.own[:WITNESSED], scene.own[WITNESSED:]
    scene.witness.post(protocol.FREE, slots)


def _window_beside_slots(scene: Scene) -> None:
    scene.take(3)
    scene.open_window(2)


def _request(op: int, *arguments: Any) -> Callable[[Scene], None]:
    return lambda scene: scene.client.do("send", op, *arguments)


VERBS = {
    "alloc": Verb(_request(protocol.ALLOC, 3, None, False), holds=3, answers=3),
    "free": Verb(
        lambda scene: scene.post(protocol.FREE, scene.held[:2]), 1, lambda scene: scene.take(3), posted=True
    ),
    "begin": Verb(_request(protocol.BEGIN, 4, None, False), holds=4, answers=4),
    "end": Verb(
        lambda scene: scene.post(protocol.END, scene.held[2:]), 2, lambda scene: scene.open_window(4), posted=True
    ),
    "clear": Verb(lambda scene: scene.post(protocol.CLEAR, None), 0, _window_beside_slots, posted=True),
    "transfer": Verb(
        lambda scene: scene.client.do("send", protocol.OFFER, scene.held[:2], scene.witness.number),
        3,
        lambda scene: scene.take(3),
    ),
    "accept": Verb(_request(protocol.ACCEPT, False), 2, _offer_to_client, answers=2),
    "attach": Verb(lambda scene: scene.client.do("send_hello"), 0, attached=False),
    "attach-guaranteed": Verb(lambda scene: scene.client.do("send_hello"), 4, attached=False, guarantee=4),
    "detach": Verb(_request(protocol.DETACH), 0, lambda scene: scene.take(3), detaches=True),
    "waiting-alloc": Verb(_request(protocol.ALLOC, 4, None, True), 4, _fill, let=_make_room, answers=4),
}


@dataclass
class Killing:
    """All verbs in one daemon; the clients are one process."""

    daemon: Daemon
    child: Child
    scenes: list[Scene]
    allocator: int

    def hold_allocator(self) -> None:
        os.kill(self.allocator, signal.SIGSTOP)

    def kill_client(self, *, send_first: bool) -> None:
        if send_first:
            for scene in self.scenes:
                scene.client.do("flush")
        os.kill(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def kill_allocator(self) -> None:
        os.kill(self.allocator, signal.SIGKILL)
        successor_of(self.daemon, self.allocator)
        for scene in self.scenes:
            greeting = scene.witness.come_back()
            assert greeting[0] == OK, f"{scene.name}: the witness was answered {greeting}"

    def let_allocator_go(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.allocator, signal.SIGCONT)


@pytest.fixture
def killing(lasting_daemon: Daemon, children: Children) -> Iterator[Killing]:
    daemon = lasting_daemon
    # serve gives up over an allocator that lives for moments only, time and again.
    wait_until(lambda: daemon.status()["uptime_s"] > 1.1 * SHORT_LIFE_S, "the allocator has lived for a while")
    child = children.start("from soaking import serve_raw_sessions; serve_raw_sessions()")
    made = Killing(daemon, child, [], daemon.allocator_pid)
    for name, verb in VERBS.items():
        witness = RawSession(daemon.dir, name, create_slots=SLOTS)
        assert witness.hello()[0] == OK
        own = witness.ask(protocol.ALLOC, WITNESSED, None, False)[1]
        client = RemoteSession(child, name, str(daemon.dir), name, guarantee=verb.guarantee)
        table = st.SlotTableReader(daemon.directory.slot_table(name))
        scene = Scene(name, verb, client, witness, table, own=own)
        if verb.attached:
            scene.number = client.do("hello")[1]["session"]
            verb.prepare(scene)
        made.scenes.append(scene)
    yield made
    made.let_allocator_go()
    for scene in made.scenes:
        scene.witness.close()


def bring_to(point: str, killing: Killing) -> None:
    if point == "before send":
        return
    if point == "after send":
        killing.hold_allocator()
    for scene in killing.scenes:
        scene.verb.send(scene)
        if point != "after send":
            scene.verb.let(scene)
            wait_until(scene.arrived, f"{scene.name} was applied")
        if point == "after reply":
            hear(scene)


def hear(scene: Scene) -> None:
    """Take the reply, which has to be the right one, and see in the table what it says."""
    if scene.verb.posted:
        wait_until(scene.arrived, f"{scene.name} was applied")
    else:
        reply = scene.client.do("receive")
        assert reply is not None, f"{scene.name} was not answered"
        assert reply[0] == OK, f"{scene.name}: {reply}"
        if not scene.verb.attached:
            scene.number = reply[1]["session"]
            assert len(reply[1].get("granted", [])) == scene.verb.holds
        if scene.verb.answers:
            granted = [slot for slot, holder in enumerate(holders(scene.table)) if holder == scene.number]
            assert sorted(reply[1]) == granted, f"{scene.name} answered {reply[1]}, the table has {granted}"
        if scene.name == "accept":
            scene.own = scene.own[:WITNESSED]
    assert scene.client_holds() == scene.verb.holds, scene.name


def come_back(scene: Scene, point: str) -> None:
    """What a client does whose allocator was killed: it goes on until its verb is answered."""
    verb = scene.verb
    if verb.detaches and point in ("before reply", "after reply"):
        assert scene.client_holds() == 0
        return  # it has left
    greeting = scene.client.do("come_back")
    assert greeting[0] == OK, f"{scene.name}: {greeting}"
    if point == "after reply":
        assert scene.client_holds() == verb.holds, scene.name
        return
    if not verb.attached:
        scene.number = greeting[1]["session"]
        assert scene.client_holds() == len(greeting[1].get("granted", [])) == verb.holds
        return
    if point == "before send":
        verb.send(scene)
    elif not verb.posted:
        scene.client.do("repeat")
    if point != "before reply":
        verb.let(scene)
    hear(scene)


def account_for(scene: Scene) -> None:
    """Only the witness is left: what it holds is its own, all the rest is free, and each slot is there once."""
    witness = scene.witness
    # Its last message may be applied only now: what it holds is final when it is attached no more.
    wait_until(lambda: set(sessions(scene.table)) == {witness.number}, f"{scene.name}: the client's session ends")
    assert set(holders(scene.table)) <= {0, witness.number}, f"{scene.name}: the dead hold slots"
    held = [slot for slot, holder in enumerate(holders(scene.table)) if holder == witness.number]
    if scene.name == "accept":  # given, or still the giver's: the client may have died before or after
        assert held in (sorted(scene.own), sorted(scene.own[:WITNESSED]))
    else:
        assert held == sorted(scene.own), scene.name
    assert witness.ask(protocol.ACCEPT, False) == [protocol.NONE], f"{scene.name}: an offer of the dead"
    witness.post(protocol.FREE, held)
    reply = witness.ask(protocol.ALLOC, SLOTS, None, False)
    assert sorted(reply[1]) == list(range(1, SLOTS + 1)), scene.name
    assert audit(scene.table)
    assert witness.ask(protocol.DETACH) == [OK]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("dies", ["client", "allocator", "both"])
def test_a_kill_loses_nothing_doubles_nothing_and_the_survivors_go_on(
    killing: Killing, dies: str, point: str
) -> None:
    bring_to(point, killing)
    if dies != "allocator":
        killing.kill_client(send_first=point == "after send")
    if dies != "client":
        killing.kill_allocator()
    killing.let_allocator_go()
    for scene in killing.scenes:
        if dies == "allocator":
            come_back(scene, point)
            if not scene.verb.detaches:
                assert scene.client.do("ask", protocol.DETACH) == [OK]
        account_for(scene)
