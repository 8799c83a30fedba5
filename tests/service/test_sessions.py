from __future__ import annotations

import pytest
from dispatching import make_session

from mambapool.pool.errors import AllocatorUnavailable, ProtocolError
from mambapool.service.pools import Pool
from mambapool.service.sessions import MAX_OPEN, Answer, Session, SessionRows


@pytest.fixture
def session(pool: Pool) -> Session:
    return make_session(pool)


def test_replies_below_the_oldest_open_request_are_forgotten(session: Session) -> None:
    for request_id in range(1, 6):
        session.answers[request_id] = Answer(b"reply")
    session.close_requests_below(4)
    assert list(session.answers) == [4, 5]
    assert session.oldest_open == 4


def test_the_oldest_open_request_never_goes_back(session: Session) -> None:
    session.close_requests_below(4)
    session.answers[4] = Answer(b"reply")
    session.close_requests_below(3)
    session.close_requests_below(4)
    assert session.oldest_open == 4
    assert list(session.answers) == [4]


def test_barred_ids_are_kept_while_they_may_still_come(session: Session) -> None:
    session.barred = {2, 5, 9}
    session.close_requests_below(5)
    assert session.barred == {5, 9}


def test_a_reply_behind_a_later_one_is_forgotten_with_it_at_the_latest(session: Session) -> None:
    for request_id in (9, 2, 7, 11):
        session.answers[request_id] = Answer(b"reply")
    session.close_requests_below(10)
    assert sorted(session.answers) == [11]


def test_open_requests_and_barred_ids_share_one_limit(session: Session) -> None:
    for request_id in range(MAX_OPEN - 1):
        session.answers[request_id] = Answer(b"reply")
    session.check_room()
    session.barred.add(MAX_OPEN)
    with pytest.raises(ProtocolError, match=r"session 1 has 1024 open requests: read the replies.*oldest_open"):
        session.check_room()


def test_rows_are_handed_out_in_order_and_used_again() -> None:
    rows = SessionRows(3)
    assert [rows.take(), rows.take()] == [0, 1]
    rows.give_back(0)
    assert [rows.take(), rows.take()] == [0, 2]


def test_a_session_too_many_is_refused() -> None:
    rows = SessionRows(1)
    rows.take()
    with pytest.raises(AllocatorUnavailable, match="all 1 sessions of this pool are in use"):
        rows.take()
    rows.give_back(0)
    assert rows.take() == 0
