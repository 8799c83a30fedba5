"""Groups as the allocator has them: who may join, what is kept when a rank ends, and what a restart finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dispatching import EPOCH, Client, Connection, hello_map, make_pool, make_registry, slots_of
from leases import TestLeases

from mambapool.pool import group_page as gp
from mambapool.pool import protocol
from mambapool.pool.errors import GroupBroken, ProtocolError, RuntimeDirError
from mambapool.pool.group_page import GroupPage
from mambapool.service.attach import AttachRequest
from mambapool.service.dispatcher import Dispatcher
from mambapool.service.groups import page_path
from mambapool.service.pool_report import check_pool
from mambapool.service.pools import Pool, Shard
from mambapool.service.recovery import recover_table, restore

SLOTS = 16


class Engine:
    """Ranks of one group, and whoever else there is, on one dispatcher that may be restarted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.leases = TestLeases()
        self.pool = make_pool(directory, SLOTS, max_sessions=8)
        self.dispatcher = Dispatcher(EPOCH, make_registry(directory, self.pool, leases=self.leases))

    def restart(self) -> None:
        """The next allocator, over the same table."""
        table = recover_table(self.pool.table.path, SLOTS, bytes(16), None)
        self.pool = Pool("default", table, table.uuid, None, (), ends_with_last_session=False)
        restore(self.pool, self.leases, now=0.0)
        self.dispatcher = Dispatcher(EPOCH, make_registry(self.directory, self.pool, leases=self.leases))

    def hello(self, rank: int, group: str = "engine-0", world_size: int = 3, **more: Any) -> list[Any]:
        lease = more.pop("lease", f"{group}/{rank}".encode().ljust(16, b"."))
        connection = Connection(self.dispatcher, b"zmq-%s-%d" % (group.encode(), rank))
        return connection.hello(lease, rank=rank, group=group, world_size=world_size, name=f"rank-{rank}", **more)

    def client(self, rank: int, group: str = "engine-0", world_size: int = 3, **more: Any) -> Client:
        connection = Connection(self.dispatcher, b"zmq-%s-%d" % (group.encode(), rank))
        options = {"rank": rank, "group": group, "world_size": world_size, "name": f"rank-{rank}", **more}
        return Client(connection, f"{group}/{rank}".encode().ljust(16, b"."), options)

    def kill(self, *clients: Client) -> None:
        for client in clients:
            self.leases.dead.add(client.lease)
        for client in clients:
            self.dispatcher.lease_released(client.lease, "its process ended")

    @property
    def pages(self) -> list[str]:
        return sorted(path.name for path in self.directory.glob("default.group-*"))

    def page(self, client: Client) -> GroupPage:
        group = self.pool.sessions[client.number].group
        assert group is not None
        return GroupPage(group.page.path)

    def states(self) -> dict[int, str]:
        return {session.rank: session.state(0.0) for session in self.pool.sessions.values()}


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def ends(page: GroupPage) -> list[int]:
    return [page.word(rank, gp.R_END) for rank in range(page.layout.world_size)]


def test_the_page_says_who_has_joined_and_when_all_have(engine: Engine) -> None:
    first = engine.client(1)
    page = engine.page(first)
    assert page.path == page_path(engine.pool.table.path, first.number)
    assert page.items[gp.H_NUMBER] == first.number
    assert page.layout == gp.GroupLayout(3, SLOTS)
    others = [engine.client(0), engine.client(2)]
    assert page.items[gp.H_FORMED] == 1
    assert page.items[gp.H_READY] == others[0].number
    assert page.is_complete()
    joined = [page.word(rank, gp.R_SESSION) for rank in range(3)]
    assert joined == [others[0].number, first.number, others[1].number]


def test_hello_names_the_page_and_the_guarantee_to_every_rank(engine: Engine) -> None:
    replies = [engine.hello(rank, guarantee=5)[3] for rank in (1, 0, 2)]
    assert {reply["group"] for reply in replies} == {"default.group-1"}
    assert [reply["guarantee"] for reply in replies] == [5, 5, 5]
    assert ["granted" in reply for reply in replies] == [False, True, False]
    assert [session.held for session in engine.pool.sessions.values()] == [0, 5, 0]
    engine.dispatcher.registry.check()


def test_a_guarantee_is_counted_once_and_refused_to_the_rank_that_holds_it(engine: Engine) -> None:
    assert engine.hello(1, guarantee=SLOTS)[2] == protocol.OK
    assert engine.hello(0, guarantee=SLOTS)[2] == protocol.OK
    reply = engine.hello(0, "other", guarantee=1)
    assert (reply[2], "guaranteed are 16: rank-0" in reply[3]) == (protocol.GUARANTEE_EXCEEDED, True)
    assert "other" not in engine.pool.groups


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_rank_0_that_takes_the_place_of_a_ready_one_is_not_ready_before_it_has_its_guarantee(
    engine: Engine, evicted: bool, restarted: bool
) -> None:
    first, second = engine.client(0, guarantee=4), engine.client(1, guarantee=4)
    page = engine.page(second)
    if evicted:
        engine.dispatcher.registry.evict(engine.pool.sessions[first.number])
    else:
        engine.kill(first)
    bystander = engine.client(0, "other", world_size=1)
    taken = slots_of(bystander.alloc(SLOTS - 3))
    assert engine.hello(2, guarantee=4)[2] == protocol.OK
    lease = b"another".ljust(16, b".")
    connection = Connection(engine.dispatcher, b"another")
    fields = hello_map(lease, rank=0, group="engine-0", world_size=3, guarantee=4, name="another")
    assert connection.send(protocol.HELLO, 0, 1, 0, 0, 0, fields) is None  # waits for four free slots
    assert (page.items[gp.H_FORMED], page.is_complete()) == (1, False)
    if restarted:
        engine.restart()
        connection = Connection(engine.dispatcher, b"another")
        assert connection.send(protocol.HELLO, 0, 2, 0, 0, 0, fields) is None
        bystander = engine.client(0, "other", world_size=1)
        assert not page.is_complete()
    bystander.post(protocol.FREE, taken[0])
    (greeting,) = connection.late_bodies()
    assert protocol.unpack(greeting, len(greeting))[2] == protocol.OK
    assert page.is_complete()
    engine.dispatcher.registry.check()


def test_hello_again_is_the_same_rank(engine: Engine) -> None:
    first = engine.hello(0)
    assert engine.hello(0, resume=first[3]["session"])[3] == first[3]
    assert len(engine.pool.sessions) == 1


@pytest.mark.parametrize("limit", [None, 12])
def test_a_rank_that_differs_leaves_nothing(engine: Engine, limit: int | None) -> None:
    engine.hello(0, limit=12)
    different: dict[str, Any]
    for different in ({"world_size": 2}, {"limit": 11}, {"limit": limit, "guarantee": 2}):
        fields: dict[str, Any] = {"limit": 12, **different}
        reply = engine.hello(1, **fields)
        assert reply[2] == protocol.GEOMETRY_MISMATCH
        assert "rank 0 (rank-0, session 1, pid 4310)" in reply[3]
    assert len(engine.pool.sessions) == 1
    assert engine.leases.open_names == {b"engine-0/0......"}


def test_a_world_size_must_be_the_number_of_shards(tmp_path: Path) -> None:
    shards = [Shard(f"keeper-default-{rank}.sock", bytes([rank]) * 16) for rank in range(2)]
    registry = make_registry(tmp_path, make_pool(tmp_path, 8, shards=shards))
    reply = Connection(Dispatcher(EPOCH, registry)).hello(group="g", world_size=4, rank=1)
    assert (reply[2], reply[3]) == (
        protocol.GEOMETRY_MISMATCH,
        "world_size: group g has 4 ranks, pool 'default' has 2 shards",
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group", ""),
        ("group", "a b"),
        ("group", 5),
        ("group", "g" * 49),
        ("world_size", 0),
        ("world_size", 257),
        ("world_size", None),
        ("world_size", "2"),
        ("rank", 3),
    ],
)
def test_what_makes_no_group_is_malformed(engine: Engine, field: str, value: object) -> None:
    fields = hello_map() | {"group": "g", "world_size": 3, "rank": 0, field: value}
    with pytest.raises(ProtocolError, match=field if field != "rank" else "rank 3 is out of range"):
        AttachRequest.from_wire(fields)


def test_who_leaves_before_all_have_joined_makes_room(engine: Engine) -> None:
    clients = [engine.client(0, guarantee=4), engine.client(1, guarantee=4)]
    page = engine.page(clients[1])
    engine.kill(clients[0])
    assert [page.word(rank, gp.R_SESSION) for rank in range(3)] == [0, clients[1].number, 0]
    assert engine.pool.ledger.free_count == SLOTS
    assert engine.hello(0, lease=b"another" + bytes(9), guarantee=4)[2] == protocol.OK
    engine.kill(clients[1])
    assert page.items[gp.H_FORMED] == 0
    engine.dispatcher.registry.check()
    rest = list(engine.pool.sessions.values())
    engine.dispatcher.registry.end(rest[0], "left", dead=False)
    assert engine.pages == []
    assert engine.pool.groups == {}


@pytest.mark.parametrize("dies", [0, 2])
@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_dead_rank_held_is_kept_until_all_have_ended(engine: Engine, dies: int, restarted: bool) -> None:
    ranks = [engine.client(rank) for rank in range(3)]
    ranks[0].alloc(5)
    page = engine.page(ranks[0])
    engine.kill(ranks[dies])
    assert ends(page)[dies] == gp.DIED
    assert page.items[gp.H_TROUBLE] == 1
    if restarted:
        engine.restart()
    assert engine.states()[dies] == "gone"
    assert engine.pool.ledger.free_count == SLOTS - 5
    late = engine.hello(dies, lease=b"late" + bytes(12))
    assert late[2] == protocol.GROUP_BROKEN
    assert f"group engine-0 cannot be joined: rank {dies} (rank-{dies}, session" in late[3]
    others = [rank for rank in ranks if rank is not ranks[dies]]
    engine.kill(others[0])
    assert engine.pool.ledger.free_count == SLOTS - 5
    engine.dispatcher.registry.check()
    engine.kill(others[1])
    assert engine.pool.ledger.free_slots().tolist() == list(range(1, SLOTS + 1))
    assert engine.pool.sessions == {}
    assert engine.pages == []


def test_a_rank_that_leaves_is_gone_and_answered_like_a_session(engine: Engine) -> None:
    ranks = [engine.client(rank) for rank in range(3)]
    page = engine.page(ranks[0])
    assert ranks[1].request(protocol.DETACH)[2] == protocol.OK
    assert ranks[1].request(protocol.DETACH)[2] == protocol.UNKNOWN_SESSION
    assert ends(page) == [0, gp.LEFT, 0]
    engine.leases.dead.add(ranks[1].lease)  # its file is gone with it
    engine.restart()
    assert engine.states() == {0: "live", 1: "gone", 2: "live"}
    assert ends(page) == [0, gp.LEFT, 0]


def test_a_gone_rank_is_audited_as_gone(engine: Engine) -> None:
    ranks = [engine.client(rank, world_size=2) for rank in range(2)]
    ranks[1].request(protocol.DETACH)
    operator = Connection(engine.dispatcher, b"operator")
    audit = operator.ask(protocol.AUDIT, 0, 1, 0, 0, 0, "default")
    assert audit[2] == protocol.OK
    assert [holder["state"] for holder in audit[3]["holders"]] == ["live", "gone"]


def test_all_that_died_while_no_allocator_ran_end_at_once(engine: Engine) -> None:
    ranks = [engine.client(rank) for rank in range(3)]
    bystander = engine.client(0, "other", world_size=1)
    ranks[0].alloc(5)
    bystander.alloc(2)
    for rank in ranks:
        engine.leases.dead.add(rank.lease)
    engine.restart()
    assert [session.name for session in engine.pool.sessions.values()] == ["rank-0"]
    assert list(engine.pool.groups) == ["other"]
    assert engine.pages == [f"default.group-{bystander.number}"]
    assert engine.pool.ledger.free_count == SLOTS - 2


def test_a_page_nobody_belongs_to_is_removed_and_a_lost_one_made_anew(engine: Engine) -> None:
    rank = engine.client(0, world_size=2)
    GroupPage.create(page_path(engine.pool.table.path, 99), 99, 2, SLOTS)
    engine.page(rank).remove()
    engine.restart()
    assert engine.pages == [f"default.group-{rank.number}"]
    assert engine.page(rank).word(0, gp.R_SESSION) == rank.number


def test_an_incomplete_group_is_taken_over_as_it_is(engine: Engine) -> None:
    first, second = engine.client(0, guarantee=3), engine.client(1, guarantee=3)
    engine.leases.dead.add(second.lease)
    engine.restart()
    assert engine.states() == {0: "live"}
    assert engine.hello(1, lease=b"another" + bytes(9), guarantee=4)[2] == protocol.GEOMETRY_MISMATCH
    assert engine.hello(1, lease=b"another" + bytes(9), guarantee=3)[2] == protocol.OK
    assert engine.hello(2, guarantee=3)[2] == protocol.OK
    assert engine.page(first).items[gp.H_FORMED] == 1


def test_a_page_that_cannot_be_made_refuses_the_rank(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> GroupPage:
        raise RuntimeDirError("cannot make the group page: no space left on device")

    monkeypatch.setattr(GroupPage, "create", full)
    reply = engine.hello(0)
    assert (reply[2], reply[3]) == (protocol.REFUSED, "cannot make the group page: no space left on device")
    assert engine.pool.sessions == {}
    assert engine.leases.open_names == set()
    monkeypatch.undo()
    assert engine.hello(0)[2] == protocol.OK


@pytest.mark.parametrize("by", [0, 2])
def test_an_operator_ends_a_whole_group(engine: Engine, by: int) -> None:
    ranks = [engine.client(rank) for rank in range(3)]
    ranks[0].alloc(4)
    page = engine.page(ranks[0])
    engine.kill(ranks[0])
    operator = Connection(engine.dispatcher, b"operator")
    refused = operator.ask(protocol.EVICT, 0, 1, 0, 0, 0, ranks[by].number, False)
    assert refused[2] == protocol.REFUSED
    assert "of group engine-0, of which rank 1 (pid 4310), rank 2 (pid 4310) live" in refused[3]
    evicted = operator.ask(protocol.EVICT, 0, 1, 0, 0, 0, ranks[by].number, True)
    assert evicted[2:] == [protocol.OK, {"slots": 4, "alive": True}]
    assert ends(page) == [gp.DIED, gp.EVICTED, gp.EVICTED]
    assert engine.pool.sessions == {}
    assert engine.dispatcher.registry.sessions == {}
    assert engine.pages == []
    assert operator.ask(protocol.EVICT, 0, 1, 0, 0, 0, ranks[by].number, True)[2] == protocol.REFUSED


def test_one_incomplete_rank_is_evicted_alone(engine: Engine) -> None:
    first, second = engine.client(0), engine.client(1)
    engine.leases.dead.add(first.lease)
    operator = Connection(engine.dispatcher, b"operator")
    assert operator.ask(protocol.EVICT, 0, 1, 0, 0, 0, first.number, False)[2] == protocol.OK
    assert list(engine.pool.sessions) == [second.number]


def test_an_offer_to_any_rank_is_one_to_rank_0(engine: Engine) -> None:
    ranks = [engine.client(rank, world_size=2) for rank in range(2)]
    giver = engine.client(0, "giver", world_size=1)
    giver.alloc(2)
    assert giver.offer(ranks[1].number, 1, 2)[2] == protocol.OK
    accepted = ranks[0].accept()
    assert accepted is not None
    assert slots_of(accepted) == [1, 2]
    ranks[0].offer(giver.number, 1)
    assert ranks[0].offer(ranks[1].number, 2)[2] == protocol.INVALID_SLOTS  # to itself
    engine.kill(giver)
    assert not engine.pool.offers


def test_offers_to_a_group_end_with_its_rank_0(engine: Engine) -> None:
    ranks = [engine.client(rank, world_size=2) for rank in range(2)]
    giver = engine.client(0, "giver", world_size=1)
    giver.alloc(3)
    giver.offer(ranks[0].number, 1, 2)
    engine.kill(ranks[0])
    assert not engine.pool.offers
    assert giver.post(protocol.FREE, 1) is None
    assert giver.offer(ranks[1].number, 2)[2] == protocol.INVALID_SLOTS
    engine.dispatcher.registry.check()


def test_a_gone_rank_waits_for_nothing(engine: Engine) -> None:
    ranks = [engine.client(rank, world_size=2) for rank in range(2)]
    ranks[0].alloc(SLOTS)
    assert ranks[0].wait_for(1) is None
    engine.kill(ranks[0])
    assert len(engine.pool.waiting) == 0
    assert engine.pool.table._items[19] == 0  # slots that are waited for


def test_a_name_is_one_pools(tmp_path: Path) -> None:
    registry = make_registry(tmp_path, make_pool(tmp_path), make_pool(tmp_path, 8, "other"))
    dispatcher = Dispatcher(EPOCH, registry)
    for pool in ("default", "other"):
        lease = pool.encode().ljust(16, b".")
        reply = Connection(dispatcher, pool.encode()).hello(lease, pool=pool, group="g", world_size=2)
        assert reply[2] == protocol.OK


def test_the_largest_group_ends_in_one_change(tmp_path: Path) -> None:
    """The redo record has room for it."""
    pool = make_pool(tmp_path, 4, max_sessions=300)
    leases = TestLeases()
    registry = make_registry(tmp_path, pool, leases=leases)
    sessions = []
    for rank in range(gp.MAX_WORLD_SIZE):
        fields = hello_map(rank.to_bytes(16, "little"), group="g", world_size=gp.MAX_WORLD_SIZE, rank=rank)
        sessions.append(registry.attach(AttachRequest.from_wire(fields), b"%d" % rank)[0])
    pool.grant(sessions[0], 3, 7)
    pool.commit()
    with pytest.raises(GroupBroken, match="rank 5 of group g is taken"):
        registry.attach(AttachRequest.from_wire({**fields, "lease": b"x" * 16, "rank": 5}), b"late")
    for session in sessions:
        leases.dead.add(session.lease.name)
        registry.bury(session.lease.name, "its process ended")
    check_pool(pool)
    assert pool.sessions == {}
    assert pool.ledger.free_slots().tolist() == [1, 2, 3, 4]
