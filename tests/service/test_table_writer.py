from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dispatching import BUSY_CYCLE, BUSY_SLOTS, EPOCH, TableFile, make_pool, make_session, write_busily

from mambapool.pool import slot_table as st
from mambapool.pool.errors import ProtocolError, RuntimeDirError
from mambapool.pool.slot_table import SlotTableReader, TableLayout, Words, owner_word
from mambapool.service.ledger import SMALL_BATCH
from mambapool.service.pool_report import check_pool
from mambapool.service.pools import Pool
from mambapool.service.sessions import Session
from mambapool.service.table_writer import SlotTableWriter

SLOTS = 40
BATCHES = [1, 2, 3, SMALL_BATCH, SMALL_BATCH + 1, 30]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    pool = make_pool(tmp_path, SLOTS)
    yield pool
    check_pool(pool)


@pytest.fixture
def session(pool: Pool) -> Session:
    return make_session(pool)


@pytest.fixture
def reader(pool: Pool) -> SlotTableReader:
    return SlotTableReader(pool.table.path, pool.uuid)


def row(reader: SlotTableReader, field: int, slots: list[int]) -> list[int]:
    words: list[int] = reader.words[reader.layout.field(field) :][: reader.layout.slots + 1][slots].tolist()
    return words


def take(pool: Pool, session: Session, count: int, request_id: int = 5) -> list[int]:
    """Grant and commit."""
    granted = pool.grant(session, count, request_id)
    assert granted is not None
    pool.commit()
    return [granted] if isinstance(granted, int) else granted.tolist()


def give_back(pool: Pool, session: Session, slots: list[int]) -> None:
    """Free and commit."""
    pool.give_back(session, np.array(slots, np.int32), session.applied + 1)
    pool.commit()


def test_a_new_table_says_what_it_is(tmp_path: Path) -> None:
    layout = TableLayout(5, 3)
    uuid, digest = bytes(range(16)), bytes(range(16, 32))
    SlotTableWriter.create(tmp_path / "x.table", layout, uuid=uuid, digest=digest, epoch=EPOCH)
    reader = SlotTableReader(tmp_path / "x.table", uuid)
    assert bytes(reader.words[:1].tobytes()) == b"MAMBPOOL"
    assert (reader.layout, reader.epoch, reader.free_count) == (layout, EPOCH, 5)
    assert reader.words[st.H_DIGEST : st.H_DIGEST + 2].tobytes() == digest
    assert (reader.items[st.H_SEQ], reader.items[st.H_DONE]) == (0, 0)
    assert reader.applied_and_free_slots(0)[1].tolist() == [1, 2, 3, 4, 5]
    info = (tmp_path / "x.table").stat()
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_blocks * 512 >= layout.size_bytes, "the file has holes"


def test_a_new_table_leaves_the_old_one_to_those_who_have_it_mapped(tmp_path: Path) -> None:
    pool = make_pool(tmp_path, uuid=b"a" * 16)
    old = SlotTableReader(pool.table.path, b"a" * 16)
    take(pool, make_session(pool), 3)
    make_pool(tmp_path, uuid=b"b" * 16)
    assert old.free_count == 13
    assert SlotTableReader(pool.table.path, b"b" * 16).free_count == 16
    assert os.listdir(tmp_path) == ["default.table"]


def test_a_table_that_does_not_fit_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RuntimeDirError, match=r"of [0-9]+ bytes: No space left"):
        make_pool(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_table_in_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeDirError, match="No such file"):
        make_pool(tmp_path / "missing")


def test_a_removed_table_stays_for_those_who_have_it_mapped(pool: Pool, reader: SlotTableReader) -> None:
    pool.table.remove()
    pool.table.remove()
    assert not pool.table.path.exists()
    assert reader.free_count == SLOTS


@pytest.mark.parametrize("count", BATCHES)
def test_a_grant_and_a_free_write_their_rows(
    pool: Pool, session: Session, reader: SlotTableReader, count: int
) -> None:
    slots = take(pool, session, count, request_id=77)
    assert slots == list(range(1, count + 1))
    assert row(reader, st.OWNER, slots) == [owner_word(session.number)] * count
    assert row(reader, st.REQUEST, slots) == [77] * count
    assert row(reader, st.GENERATION, slots) == [1] * count
    assert reader.free_count == SLOTS - count
    give_back(pool, session, slots[::-1])
    assert row(reader, st.OWNER, slots) == [0] * count
    assert row(reader, st.ORDER, slots[::-1]) == list(range(SLOTS + 1, SLOTS + 1 + count))
    applied, free = reader.applied_and_free_slots(session.row)
    assert applied == 1
    assert free.tolist() == [*range(count + 1, SLOTS + 1), *slots[::-1]]


@pytest.mark.parametrize("count", BATCHES)
def test_a_record_has_nothing_of_the_one_before(pool: Pool, session: Session, count: int) -> None:
    give_back(pool, session, take(pool, session, 30))
    slots = take(pool, session, count)
    give_back(pool, session, slots)
    assert pool.table.free_list().tolist() == pool.ledger.free_slots().tolist()


@pytest.mark.parametrize("count", BATCHES)
def test_a_session_that_ends_frees_its_rows_whatever_their_number(pool: Pool, count: int) -> None:
    session = make_session(pool)
    other = make_session(pool, 2)
    give_back(pool, session, take(pool, session, 30))
    take(pool, other, 3)
    slots = take(pool, session, count)
    assert pool.detach(session).tolist() == sorted(slots)
    check_pool(pool)


def test_one_commit_writes_frees_and_grants_together(
    pool: Pool, session: Session, reader: SlotTableReader
) -> None:
    slots = take(pool, session, SLOTS)
    before = reader.items[st.H_SEQ]
    pool.give_back(session, np.array(slots, np.int32), 1)
    pool.close_window(session)
    again = pool.grant(session, SLOTS, 9)
    pool.open_window(session, 9)
    pool.commit()
    assert again is not None
    assert reader.items[st.H_SEQ] == reader.items[st.H_DONE] == before + 1
    assert row(reader, st.GENERATION, slots) == [2] * SLOTS
    assert row(reader, st.REQUEST, slots) == [9] * SLOTS
    assert reader.free_count == 0
    assert reader.items[reader.layout.session(session.row) + st.S_WINDOW] == 9


def test_who_still_has_what_a_request_granted_is_found(pool: Pool, session: Session) -> None:
    granted = pool.grant(session, 4, 5)
    pool.commit()
    assert granted is not None
    give_back(pool, session, [2, 3])
    take(pool, session, SLOTS - 4)
    assert take(pool, session, 1, request_id=6) == [2]
    assert pool.still_granted(session, granted, 5).tolist() == [1, 4]
    assert pool.still_granted(session, 2, 6).tolist() == [2]


class Watched:
    """The writer's scalar view; tells before ``seq`` or ``done`` is stored."""

    def __init__(self, items: memoryview, before_store: Callable[[int], None]) -> None:
        self._items = items
        self._before_store = before_store

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __setitem__(self, key: int, value: int) -> None:
        if key in (st.H_SEQ, st.H_DONE):
            self._before_store(key)
        self._items[key] = value


def nothing(_pool: Pool, _session: Session, _count: int) -> None:
    pass


def free_and_grant(pool: Pool, session: Session, count: int) -> None:
    """Free ``count`` slots, grant as many and open a window."""
    held = pool.ledger.held_by(session.number)
    pool.give_back(session, held[:count], session.applied + 1)
    pool.grant(session, count, 8)
    pool.open_window(session, 8)
    pool.commit()


def offer(pool: Pool, session: Session, count: int) -> None:
    pool.offers.make(session, pool.ledger.held_by(session.number)[:count], 2, 8)


def accept(pool: Pool, _session: Session, _count: int) -> None:
    pool.offers.accept(pool.sessions[2], 9)


def end_giver(pool: Pool, session: Session, _count: int) -> None:
    pool.detach(session)


def end_receiver(pool: Pool, _session: Session, _count: int) -> None:
    pool.detach(pool.sessions[2])


Change = Callable[[Pool, Session, int], None]

#: What comes before, and a change of one commit, of a session that holds 30 slots beside another one that holds none.
CHANGES: dict[str, tuple[Change, Change]] = {
    "frees, grants and a window": (nothing, free_and_grant),
    "an offer": (nothing, offer),
    "an accept": (offer, accept),
    "the end of a giver": (offer, end_giver),
    "the end of a receiver": (offer, end_receiver),
}
every_change = pytest.mark.parametrize(("prepare", "change"), CHANGES.values(), ids=CHANGES.keys())


@every_change
@pytest.mark.parametrize("count", BATCHES)
def test_record_then_seq_then_rows_then_done(
    pool: Pool, session: Session, monkeypatch: pytest.MonkeyPatch, count: int, prepare: Change, change: Change
) -> None:
    take(pool, session, 30)
    make_session(pool, 2)
    prepare(pool, session, count)
    table = TableFile(pool.table)
    redo = pool.table.layout.redo
    images: list[tuple[int, Words]] = []
    watched = Watched(pool.table._items, lambda key: images.append((key, table.words())))
    monkeypatch.setattr(pool.table, "_items", watched)
    before = table.words()
    change(pool, session, count)
    after = table.words()

    (first, at_seq), (second, at_done) = images
    assert (first, second) == (st.H_SEQ, st.H_DONE)
    # Up to the commit point nothing is stored but the record, and that is whole.
    assert np.array_equal(at_seq[:redo], before[:redo])
    assert np.array_equal(at_seq[redo:], after[redo:])
    # When done is stored, everything else has been.
    assert np.flatnonzero(at_done != after).tolist() == [st.H_DONE]
    assert after[st.H_SEQ] == after[st.H_DONE] == before[st.H_SEQ] + 1


@every_change
@pytest.mark.parametrize("count", BATCHES)
def test_a_record_applied_again_over_any_half_of_itself_ends_the_same(
    pool: Pool, session: Session, count: int, prepare: Change, change: Change
) -> None:
    take(pool, session, 30)
    make_session(pool, 2)
    prepare(pool, session, count)
    table = TableFile(pool.table)
    before = table.words()
    change(pool, session, count)
    after = table.words()
    for stores in range(4 * SLOTS):
        table.interrupt(before, after, stores)
        table.apply_record_again()
        assert np.array_equal(table.words(), after), f"after {stores} stores"
    table.apply_record_again()
    assert np.array_equal(table.words(), after)


@pytest.fixture
def busy_table(tmp_path: Path) -> Iterator[SlotTableReader]:
    """The table of a pool that another process changes all the time."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=write_busily, args=(tmp_path, stop))
    process.start()
    try:
        yield wait_for_table(tmp_path / "default.table")
    finally:
        stop.set()
        process.join(20)
    assert process.exitcode == 0


def wait_for_table(path: Path) -> SlotTableReader:
    """A reader of a table in which something happens."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        # It may have no file yet, or no header in it.
        with contextlib.suppress(RuntimeDirError, ProtocolError):
            reader = SlotTableReader(path)
            if reader.applied_and_free(0)[0] > BUSY_CYCLE:
                return reader
        time.sleep(0.005)
    raise AssertionError("the writing process did not start")


def test_a_reader_never_sees_two_moments_at_once(busy_table: SlotTableReader) -> None:
    first, _ = busy_table.applied_and_free(0)
    end = time.monotonic() + 1.0
    reads = 0
    while time.monotonic() < end:
        applied, free = busy_table.applied_and_free(0)
        assert free == BUSY_SLOTS - applied % BUSY_CYCLE
        applied, slots = busy_table.applied_and_free_slots(0)
        assert len(slots) == len(set(slots.tolist())) == BUSY_SLOTS - applied % BUSY_CYCLE
        reads += 2
    assert busy_table.applied_and_free(0)[0] > first + 100, "the other process did nothing meanwhile"
    assert reads > 100
