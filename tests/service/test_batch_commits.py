"""What a batch stores at once is what a recovery would store from its record."""

from __future__ import annotations

from pathlib import Path

import pytest
from dispatching import make_pool, make_session

from mambapool.pool import slot_table as st
from mambapool.service.ledger import SMALL_BATCH
from mambapool.service.pool_report import check_pool
from mambapool.service.table_writer import SlotTableWriter

SLOTS = 80


@pytest.mark.parametrize("granted", [1, 2, SMALL_BATCH, SMALL_BATCH + 1, 30])
@pytest.mark.parametrize("freed", [0, 1, 3, SMALL_BATCH, SMALL_BATCH + 1, 33])
def test_a_recovery_makes_of_the_record_what_the_commit_has_stored(
    tmp_path: Path, freed: int, granted: int
) -> None:
    pool = make_pool(tmp_path, SLOTS)
    session = make_session(pool)
    table, ledger, commits = pool.table, pool.ledger, pool.batches
    assert commits is not None
    at = table.layout.session(session.row)
    earlier = None
    if freed:
        earlier = ledger.take_packed(freed, session.number)
        assert earlier is not None
        commits.grant(*earlier, st.owner_word(session.number), 2)
        commits.commit(ledger.free_count)
    before = bytes(table.mapping)
    if earlier is not None:
        order = ledger.next_order
        commits.free(earlier[0], ledger.give_back_packed(earlier[0], session.number), order, at + st.S_APPLIED, 1)
    taken = ledger.take_packed(granted, session.number)
    assert taken is not None
    commits.grant(*taken, st.owner_word(session.number), 3)
    commits.window(at + st.S_WINDOW, 3)
    commits.commit(ledger.free_count)
    after = bytes(table.mapping)

    # As if it had died right after the commit point: the record and `seq` are there, and nothing else.
    record = 8 * table.layout.redo
    table.mapping[:record] = before[:record]
    table.items[st.H_SEQ] += 1
    assert bytes(table.mapping) != after
    recovered = SlotTableWriter.recover(table.path)
    assert bytes(recovered.mapping) == after
    session.held, session.applied, session.window = granted, int(bool(freed)), 3
    check_pool(pool)
