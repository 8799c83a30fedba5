from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from dispatching import make_pool, make_session

from mambapool.pool import slot_table as st
from mambapool.pool.errors import NotHolder
from mambapool.pool.layout import Geometry, TensorSpec
from mambapool.pool.slot_table import SlotTableReader
from mambapool.service.ledger import Ids
from mambapool.service.offers import Offers
from mambapool.service.pool_report import check_pool, pool_status
from mambapool.service.pools import Pool, Shard
from mambapool.service.sessions import GUARANTEE_REQUEST, Session


@pytest.fixture(autouse=True)
def _checked(pool: Pool) -> Iterator[None]:
    yield
    check_pool(pool)


@pytest.fixture
def reader(pool: Pool) -> SlotTableReader:
    return SlotTableReader(pool.table.path)


def take(pool: Pool, session: Session, count: int, request_id: int = 5) -> list[int]:
    """Grant and commit."""
    granted = pool.grant(session, count, request_id)
    assert granted is not None
    pool.commit()
    return [granted] if isinstance(granted, int) else granted.tolist()


def array(*slots: int) -> Ids:
    return np.array(slots, np.int32)


def session_words(reader: SlotTableReader, session: Session) -> list[int]:
    words: list[int] = reader.words[reader.layout.session(session.row) :][: st.SESSION_WORDS].tolist()
    return words


def test_an_attached_session_is_written_with_all_that_is_durable_of_it(
    pool: Pool, reader: SlotTableReader
) -> None:
    session = make_session(pool, 3, rank=2, guarantee=5, limit=7)
    words = session_words(reader, session)
    assert words[st.S_NUMBER] == 3
    assert np.array(words[st.S_LEASE : st.S_LEASE + 2], np.uint64).tobytes() == session.lease.name
    assert words[st.S_APPLIED : st.S_NAME] == [0, 0, 2, 0, 5, 7, 4003]
    assert np.array(words[st.S_NAME : st.S_NAME + 6], np.uint64).tobytes() == b"engine-3".ljust(48, b"\0")
    assert words[st.S_WORLD_SIZE :] == [0] * 8  # it is in no group
    assert reader.items[st.H_NEXT_SESSION] == 4
    (row,) = pool.table.sessions()
    assert (row.lease, row.name, row.pid, row.rank) == (session.lease.name, "engine-3", 4003, 2)
    assert (row.number, row.row, row.guarantee, row.limit, row.applied, row.window) == (3, 0, 5, 7, 0, 0)


def test_a_long_name_is_cut_off_at_a_whole_letter(pool: Pool) -> None:
    make_session(pool, name="x" + "ä" * 40)
    (row,) = pool.table.sessions()
    assert row.name == "x" + "ä" * 23


def test_a_row_that_is_used_again_has_nothing_of_the_session_before(pool: Pool, reader: SlotTableReader) -> None:
    first = make_session(pool, 1)
    take(pool, first, 3)
    pool.open_window(first, 5)
    pool.skip(first, 9)
    pool.commit()
    pool.detach(first)
    assert session_words(reader, first)[st.S_NUMBER] == 0
    second = make_session(pool, 2)
    assert second.row == first.row
    words = session_words(reader, second)
    assert (words[st.S_NUMBER], words[st.S_APPLIED], words[st.S_WINDOW]) == (2, 0, 0)


def test_detaching_frees_everything_in_ascending_order_and_in_one_commit(
    pool: Pool, reader: SlotTableReader
) -> None:
    first, second = make_session(pool, 1), make_session(pool, 2)
    take(pool, first, 3)
    take(pool, second, 2)
    take(pool, first, 1)
    before = reader.items[st.H_SEQ]
    assert pool.detach(first).tolist() == [1, 2, 3, 6]
    assert reader.items[st.H_SEQ] == before + 1
    assert reader.applied_and_free_slots(second.row)[1].tolist() == [*range(7, 17), 1, 2, 3, 6]
    assert list(pool.sessions) == [2]
    assert repr(pool) == "Pool('default', Ledger(slots=16, free=14), sessions=1)"


def test_the_list_is_ascending_again_once_nobody_holds_anything(pool: Pool, reader: SlotTableReader) -> None:
    session = make_session(pool)
    pool.give_back(session, array(*take(pool, session, 5)[::-1]), 1)
    pool.commit()
    assert pool.ledger.free_slots().tolist() != list(range(1, 17))
    pool.clear(session, 2)
    pool.commit()
    applied, free = reader.applied_and_free_slots(session.row)
    assert (applied, free.tolist()) == (2, list(range(1, 17)))


def test_clear_frees_this_sessions_slots_and_its_window_and_nothing_else(
    pool: Pool, reader: SlotTableReader
) -> None:
    first, second = make_session(pool, 1), make_session(pool, 2)
    take(pool, second, 2)
    take(pool, first, 3)
    take(pool, first, 4, request_id=8)
    pool.open_window(first, 8)
    pool.commit()
    pool.clear(first, 1)
    pool.commit()
    assert (first.held, first.window, first.applied, second.held) == (0, 0, 1, 2)
    assert session_words(reader, first)[st.S_WINDOW] == 0
    assert reader.applied_and_free(first.row) == (1, 14)


def test_a_window_is_what_its_begin_granted_and_is_still_there(pool: Pool) -> None:
    first, second = make_session(pool, 1), make_session(pool, 2)
    take(pool, first, 2)
    take(pool, first, 4, request_id=8)
    pool.open_window(first, 8)
    take(pool, second, 3, request_id=8)
    pool.open_window(second, 8)
    pool.commit()
    assert pool.windows() == {1: 4, 2: 3}
    pool.give_back(first, array(3, 4), 1)
    pool.close_window(second)
    pool.commit()
    assert pool.windows() == {1: 2}
    pool.close_window(first)
    pool.commit()
    assert pool.windows() == {}
    assert (first.held, second.held) == (4, 3)


def test_closing_a_window_that_is_not_open_stages_nothing(pool: Pool, reader: SlotTableReader) -> None:
    session = make_session(pool)
    pool.close_window(session)
    pool.commit()
    assert session_words(reader, session)[st.S_WINDOW] == 0


def test_nothing_is_staged_when_a_free_is_refused(pool: Pool, reader: SlotTableReader) -> None:
    first, second = make_session(pool, 1), make_session(pool, 2)
    take(pool, first, 2)
    take(pool, second, 1)
    for ids in (array(1, 3), array(3), 3):
        with pytest.raises(NotHolder):
            pool.give_back(first, ids, 1)
    pool.commit()
    assert (first.held, second.held, first.applied) == (2, 1, 0)
    assert reader.applied_and_free(first.row) == (0, 13)


def test_nothing_is_granted_when_fewer_are_free(pool: Pool, reader: SlotTableReader) -> None:
    session = make_session(pool)
    take(pool, session, 16)
    assert pool.grant(session, 1, 6) is None
    assert pool.grant(session, 2, 6) is None
    pool.commit()
    assert session.held == 16
    assert reader.free_count == 0


def test_more_than_the_limit_is_not_granted_however_much_is_free(pool: Pool) -> None:
    session = make_session(pool, limit=5)
    take(pool, session, 3)
    assert pool.grant(session, 3, 6) is None
    assert take(pool, session, 2) == [4, 5]
    assert pool.grant(session, 1, 6) is None
    pool.give_back(session, 4, 1)
    assert take(pool, session, 1) == [6]


def test_a_guarantee_is_what_the_first_request_granted_in_list_order(pool: Pool) -> None:
    session, other = make_session(pool, 1, guarantee=4), make_session(pool, 2)
    pool.give_back(other, array(*take(pool, other, 16)[::-1]), 1)
    assert take(pool, session, 4, request_id=GUARANTEE_REQUEST) == [16, 15, 14, 13]
    take(pool, session, 2)
    assert pool.guaranteed_ids(session).tolist() == [16, 15, 14, 13]


def test_offers_move_whole_and_change_nothing_else(pool: Pool, reader: SlotTableReader) -> None:
    first, second = make_session(pool, 1), make_session(pool, 2)
    take(pool, first, 6)
    pool.offers.make(first, array(6, 2, 4), 2, 100)
    assert [reader.offered_to(slot) for slot in range(1, 7)] == [0, 2, 0, 2, 0, 2]
    assert (first.held, first.offered) == (6, 3)
    assert pool.offers.is_made(first, array(2, 4, 6), 2)
    assert not pool.offers.is_made(first, array(2, 4), 2)
    assert pool.offers.accept(first, 9) is None
    accepted = pool.offers.accept(second, 9)
    assert accepted is not None
    assert accepted.tolist() == [2, 4, 6]
    assert [reader.holder_of(slot) for slot in range(1, 7)] == [1, 2, 1, 2, 1, 2]
    assert not pool.table.offers.any()
    assert (first.held, first.offered, second.held) == (3, 0, 3)
    assert pool.still_granted(second, accepted, 9).tolist() == [2, 4, 6]


def test_the_end_of_a_session_ends_its_offers_and_those_to_it_in_one_commit(
    pool: Pool, reader: SlotTableReader
) -> None:
    first, second, third = (make_session(pool, number) for number in (1, 2, 3))
    take(pool, first, 3)
    take(pool, second, 3)
    pool.offers.make(first, array(1), 2, 101)
    pool.offers.make(second, array(4, 5), 1, 102)
    pool.offers.make(first, array(3), 3, 103)
    pool.offers.make(first, array(2), 2, 104)
    before = reader.items[st.H_SEQ]
    assert pool.detach(second).tolist() == [4, 5, 6]
    assert reader.items[st.H_SEQ] == before + 1
    assert [reader.offered_to(slot) for slot in range(1, 7)] == [0, 0, 3, 0, 0, 0]
    assert (first.held, first.offered, third.held) == (3, 1, 0)


def test_a_lost_pool_says_so_in_its_table(pool: Pool, reader: SlotTableReader) -> None:
    pool.lose("its keeper died")
    assert (reader.items[st.H_LOST], pool.lost) == (1, "its keeper died")


def test_the_check_finds_an_offer_that_the_table_does_not_have(pool: Pool) -> None:
    first, _second = make_session(pool, 1), make_session(pool, 2)
    take(pool, first, 2)
    pool.offers.make(first, array(1), 2, 105)
    offers, pool.offers = pool.offers, Offers(pool)
    with pytest.raises(AssertionError, match="the slot table and the offers differ"):
        check_pool(pool)
    pool.offers = offers


def test_status_counts_slots_by_what_they_are(tmp_path: Path) -> None:
    geometry = Geometry((TensorSpec.parse("conv=bfloat16:2x6x3"),))
    shards = [Shard(f"keeper-p-{rank}.sock", bytes(16)) for rank in range(2)]
    pool = make_pool(tmp_path, 10, "p", geometry=geometry, shards=shards)
    session, receiver = make_session(pool, 5), make_session(pool, 6)
    take(pool, session, 2)
    take(pool, session, 3, request_id=8)
    pool.open_window(session, 8)
    pool.offers.make(session, array(2), 6, 106)
    pool.detach(receiver)
    pool.offers.make(session, array(1), make_session(pool, 7, limit=4, guarantee=3, rank=1).number, 107)
    pool.commit()
    assert pool_status(pool, 0.0) == {
        "name": "p",
        "slots": 10,
        "free": 5,
        "held": 1,
        "windows": 3,
        "offered": 1,
        "quarantined": 0,
        "waiting": 0,
        "lost": None,
        "bytes_per_slot": 72,
        "backend": "shm",
        "shards": 2,
        "holders": [
            {
                "session": 5,
                "name": "engine-5",
                "pid": 4005,
                "group": None,
                "rank": 0,
                "state": "live",
                "held": 1,
                "windows": 3,
                "offered": 1,
                "guarantee": 0,
                "limit": 10,
            },
            {
                "session": 7,
                "name": "engine-7",
                "pid": 4007,
                "group": None,
                "rank": 1,
                "state": "live",
                "held": 0,
                "windows": 0,
                "offered": 0,
                "guarantee": 3,
                "limit": 4,
            },
        ],
    }


def test_an_allocator_only_pool_has_no_bytes_and_no_backend(pool: Pool) -> None:
    status = pool_status(pool, 0.0)
    assert (status["bytes_per_slot"], status["backend"], status["shards"], status["holders"]) == (0, None, 0, [])


def test_the_check_finds_a_slot_that_the_list_and_the_table_tell_differently(pool: Pool) -> None:
    session = make_session(pool)
    take(pool, session, 2)
    pool.ledger.take_one(session.number)
    with pytest.raises(AssertionError, match="the slot table's free list is not the ledger's"):
        check_pool(pool)
    pool.ledger.release(session.number)
    pool.detach(session)


def test_the_check_finds_a_session_that_miscounts(pool: Pool) -> None:
    session = make_session(pool)
    take(pool, session, 2)
    session.held = 3
    with pytest.raises(AssertionError, match="session 1 holds 2 slots, counted 3"):
        check_pool(pool)
    session.held = 2


def test_the_check_finds_slots_of_nobody(pool: Pool) -> None:
    session = make_session(pool)
    take(pool, session, 2)
    del pool.sessions[1]
    with pytest.raises(AssertionError, match="14 free and 0 held of 16"):
        check_pool(pool)
    pool.sessions[1] = session
