"""Tensor-parallel groups as the allocator has them: who may join, and what happens when a rank ends.

The ranks make their calls through rank 0, whose session holds the group's slots, and keep in step through the
group page; the allocator knows of neither. It makes the page, and says in it who has joined and who has ended.
A rank that has ended is kept as a session until all ranks have: the others may still work on the group's slots.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mambapool.pool.errors import GeometryMismatch, GroupBroken, MambaPoolError
from mambapool.pool.group_page import DIED, GroupPage

if TYPE_CHECKING:
    from mambapool.service.attach import AttachRequest
    from mambapool.service.pools import Pool
    from mambapool.service.sessions import Session
    from mambapool.service.table_contents import SessionRow

_log = logging.getLogger("mambapool.allocator")


@dataclass(slots=True, eq=False)
class Group:
    """The sessions of one engine's ranks in one pool. Complete, it is *formed*: nobody joins it any more."""

    name: str
    #: The session that founded it: no other group ever has this number.
    number: int
    world_size: int
    guarantee: int
    limit: int
    page: GroupPage
    #: Of the protocol; 0 after a restart, which forgets it.
    version: int = 0
    #: By rank; those that are gone included.
    members: dict[int, Session] = field(default_factory=dict)

    @property
    def formed(self) -> bool:
        """Once all have joined: ranks of a formed group stay in it until it ends."""
        return len(self.members) == self.world_size

    @property
    def living(self) -> list[Session]:
        return [session for session in self.members.values() if not session.gone]

    def add(self, session: Session) -> None:
        """The session of a rank that may join."""
        self.members[session.rank] = session
        session.group = self
        self.page.join(session.rank, session.number, session.pid)
        if self.formed:
            for member in self.members.values():
                if member.dead_since is not None:  # in quarantine, and nobody could take its place
                    self.page.end(member.rank, DIED)
            self.page.form()

    def greet(self, session: Session) -> None:
        """A rank is told that it is attached; rank 0 has the guarantee by then, and all may begin."""
        if session.rank == 0:
            self.page.ready(session.number)

    def drop(self, session: Session) -> None:
        """A rank ended before the group was formed: another process may take its place."""
        del self.members[session.rank]
        self.page.join(session.rank, 0, 0)

    def lose(self, session: Session, how: int) -> None:
        """A rank of the formed group has ended; ``how`` is the page's word for it."""
        session.gone = True
        self.page.end(session.rank, how)

    def check_join(self, request: AttachRequest, limit: int) -> None:
        """Refuse who is not the missing rank of this very group, naming who is there and what differs."""
        first = self.members[min(self.members)]
        for what, theirs, ours in (
            ("world_size", request.world_size, self.world_size),
            ("guarantee", request.guarantee, self.guarantee),
            ("limit", limit, self.limit),
            ("version", request.version, self.version or request.version),
        ):
            if theirs != ours:
                raise GeometryMismatch(
                    f"{what}: rank {request.rank} ({request.name}, pid {request.pid}) has {theirs}, group {self.name} "
                    f"of {_named(first)} has {ours}"
                )
        there = self.members.get(request.rank)
        if there is None:
            return
        if ended := [session for session in self.members.values() if session.gone]:
            raise GroupBroken(
                f"group {self.name} cannot be joined: {_named(ended[0])} has ended. Its slots are kept until "
                f"{those_ranks(self.living)} ended too, or `mambapool evict {there.number}`"
            )
        raise GroupBroken(
            f"rank {request.rank} of group {self.name} is taken, by {_named(there)}: end that, or use another name"
        )


def new_group(request: AttachRequest, number: int, limit: int, pool: Pool) -> Group:
    """A group without members, founded by the session of that number; makes its page."""
    assert request.group is not None
    page = GroupPage.create(page_path(pool.table.path, number), number, request.world_size, pool.slots)
    return Group(
        request.group, number, request.world_size, request.guarantee, limit, page, version=request.version
    )


def restore_member(pool: Pool, row: SessionRow, session: Session) -> None:
    """A session of a group that an allocator before this one had."""
    group = pool.groups.get(row.group_name)
    if group is None:
        page = _page_of(pool, row)
        group = Group(row.group_name, row.group, row.world_size, row.guarantee, row.limit, page)
        pool.groups[group.name] = group
    group.add(session)


def restore_end(group: Group, dead: Collection[Session]) -> list[Session]:
    """After all of its sessions were restored: those of ``dead`` that end now; the others are kept as gone."""
    ended = [session for session in group.members.values() if session in dead]
    if not group.formed or len(ended) == group.world_size:
        return ended
    for session in ended:
        group.lose(session, DIED)
    return []


def remove_pages(table: Path, kept: Collection[int] = ()) -> None:
    """Unlink the pages of the pool with that table, but for those of the groups ``kept``."""
    for path in table.parent.glob(f"{table.stem}.group-*"):
        if path not in {page_path(table, number) for number in kept}:
            path.unlink(missing_ok=True)


def page_path(table: Path, number: int) -> Path:
    """Where the page of a group lies: beside its pool's slot table."""
    return table.with_name(f"{table.stem}.group-{number}")


def _page_of(pool: Pool, row: SessionRow) -> GroupPage:
    path = page_path(pool.table.path, row.group)
    try:
        return GroupPage(path)
    except MambaPoolError as error:
        # The ranks have the old one mapped and go on with it; that one of them has ended they learn by waiting.
        _log.warning("group %s gets a new page: %s", row.group_name, error)
        return GroupPage.create(path, row.group, row.world_size, pool.slots)


def _named(session: Session) -> str:
    return f"rank {session.rank} ({session.name}, session {session.number}, pid {session.pid})"


def those_ranks(sessions: list[Session]) -> str:
    """``rank 2 has``, ``ranks 2, 3 have``."""
    ranks = ", ".join(str(session.rank) for session in sessions)
    return f"rank {ranks} has" if len(sessions) == 1 else f"ranks {ranks} have"
