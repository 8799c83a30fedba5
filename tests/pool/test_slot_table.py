from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mambapool.pool import slot_table as st
from mambapool.pool.errors import AllocatorUnavailable, ProtocolError, RuntimeDirError, VersionMismatch
from mambapool.pool.slot_table import SlotTableReader, TableLayout, Words, owner_word

SLOTS, MAX_SESSIONS = 5, 2
UUID = bytes(range(16))

#: 512 words of header, 48 of sessions, 30 of rows, 1048 of the record: whole pages.
SIZE_BYTES = 16384


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A table as ``docs/protocol.md`` describes it: 5 slots, 2 sessions; 2 and 4 are held, 4 is offered."""
    table = np.zeros(4096, "<u8")
    table[:1] = np.frombuffer(b"MAMBPOOL", "<u8")
    table[1] = 3
    table[2:4] = np.frombuffer(UUID, "<u8")
    table[4:6] = SLOTS, MAX_SESSIONS
    table[8] = 77
    table[16:19] = 9, 9, 3
    second = 512 + 24
    table[second] = 31
    table[second + 3] = 12
    rows = 512 + 24 * MAX_SESSIONS
    table[rows : rows + 6] = 0, 0, 31 << 8 | 1, 0, 31 << 8 | 1, 0
    table[rows + 6 :][:6] = 0, 0, 6, 0, 8, 0
    table[rows + 2 * 6 :][:6] = 0, 1, 2, 3, 4, 5
    table[rows + 3 * 6 :][:6] = 0, 40, 3, 10, 4, 25
    table[rows + 4 * 6 :][:6] = 0, 0, 0, 0, 7 << 32 | 32, 0
    path = tmp_path / "default.table"
    table[: SIZE_BYTES // 8].tofile(path)
    return path


@pytest.fixture
def words(path: Path) -> Words:
    """The same table, to be written to."""
    return np.memmap(path, np.uint64, "r+")


@pytest.fixture
def reader(path: Path) -> SlotTableReader:
    return SlotTableReader(path, UUID)


@pytest.mark.parametrize(("slots", "max_sessions"), [(1, 1), (5, 2), (512, 1024), (2**20, 65536)])
def test_every_part_begins_where_the_one_before_ends(slots: int, max_sessions: int) -> None:
    layout = TableLayout(slots, max_sessions)
    assert layout.sessions == 512
    assert [layout.session(row) for row in (0, max_sessions)] == [512, layout.rows]
    assert [layout.field(field) - layout.field(field - 1) for field in range(1, 5)] == [slots + 1] * 4
    assert layout.redo == layout.field(4) + slots + 1
    assert layout.size_bytes % 4096 == 0
    assert 0 <= layout.size_bytes - 8 * (layout.redo + layout.redo_words) < 4096


def test_the_record_has_room_for_the_largest_change() -> None:
    """A window of every slot given back, and as large a one granted: parts of 4 and 3 words, ids, generations."""
    for slots in (1, 2, 1000, 2**20):
        ids = (slots + 1) // 2
        assert TableLayout(slots, 1).redo_words >= 2 + (4 + ids) + (3 + ids + slots) + 3 * 8


def test_the_record_has_room_for_the_end_of_a_session_that_holds_and_is_offered_everything() -> None:
    """Every slot of others is offered to it alone: 3 words each. Its own are freed, and the list is new."""
    for slots in (1, 2, 1000, 2**20):
        for held in (0, slots // 2, slots):
            ids, every_id = (held + 1) // 2, (slots + 1) // 2
            needed = 2 + 3 * (slots - held) + (2 + ids) + (4 + ids) + (4 + every_id) + 3 * 8
            assert TableLayout(slots, 1).redo_words >= needed


def test_a_table_is_read_as_it_is_documented(reader: SlotTableReader) -> None:
    assert reader.layout == TableLayout(SLOTS, MAX_SESSIONS)
    assert (reader.epoch, reader.free_count) == (77, 3)
    assert reader.applied_and_free(1) == (12, 3)
    assert [reader.holder_of(slot) for slot in range(6)] == [0, 0, 31, 0, 31, 0]
    assert [reader.offered_to(slot) for slot in range(6)] == [0, 0, 0, 0, 32, 0]
    assert [reader.generation_of(slot) for slot in range(6)] == [0, 1, 2, 3, 4, 5]
    assert [reader.request_of(slot) for slot in range(6)] == [0, 0, 6, 0, 8, 0]
    assert [reader.session_number(row) for row in range(2)] == [0, 31]
    assert reader.items[reader.layout.field(st.OWNER) + 2] == owner_word(31)


def test_the_free_list_is_the_free_rows_by_their_order(reader: SlotTableReader) -> None:
    applied, free = reader.applied_and_free_slots(1)
    assert (applied, free.tolist()) == (12, [3, 5, 1])
    assert free.dtype == np.int64


def test_a_change_is_seen_without_opening_the_table_again(reader: SlotTableReader, words: Words) -> None:
    words[st.H_FREE_COUNT] = 4
    assert reader.free_count == 4


def test_a_reader_cannot_write(reader: SlotTableReader) -> None:
    assert reader.items.readonly
    assert not reader.words.flags.writeable


def test_a_reader_keeps_no_file_open(reader: SlotTableReader, path: Path) -> None:
    path.unlink()
    assert reader.free_count == 3


def spoil(word: int, value: int) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        np.memmap(path, np.uint64, "r+")[word] = value

    return change


def truncate(size: int) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (spoil(0, 0), ProtocolError, "is no slot table"),
        (spoil(1, 1), VersionMismatch, "has layout version 1, this process reads 3"),
        (spoil(2, 0), ProtocolError, "is another pool's slot table"),
        (spoil(4, 6000), ProtocolError, "has 16384 bytes, its header says"),
        (spoil(5, 2**60), ProtocolError, "has 16384 bytes, its header says"),
        (truncate(8192), ProtocolError, "has 8192 bytes, its header says 16384"),
        (truncate(100), ProtocolError, "is no slot table: 100 bytes"),
        (truncate(0), ProtocolError, "is no slot table: 0 bytes"),
        (lambda path: (path.unlink(), path.mkdir()), RuntimeDirError, "cannot open .*Is a directory"),
        (Path.unlink, RuntimeDirError, "cannot open the slot table .*No such file"),
    ],
)
def test_what_is_not_the_pools_table_is_refused_with_its_path(
    path: Path, change: Callable[[Path], object], kind: type[Exception], says: str
) -> None:
    change(path)
    with pytest.raises(kind, match=says) as caught:
        SlotTableReader(path, UUID)
    assert str(path) in str(caught.value)


def test_without_a_uuid_any_table_is_read(path: Path) -> None:
    spoil(2, 0)(path)
    assert SlotTableReader(path).free_count == 3


Read = Callable[[SlotTableReader], tuple[int, object]]
every_read = pytest.mark.parametrize(
    "read",
    [lambda reader: reader.applied_and_free(1), lambda reader: reader.applied_and_free_slots(1)],
    ids=["count", "list"],
)


@every_read
def test_a_reader_waits_while_a_change_is_under_way(
    reader: SlotTableReader, words: Words, monkeypatch: pytest.MonkeyPatch, read: Read
) -> None:
    waits = []

    def finish_the_third_time(deadline: float) -> float:
        waits.append(deadline)
        if len(waits) == 3:
            words[512 + 24 + 3] = 13
            words[st.H_DONE] = 10
        return deadline

    monkeypatch.setattr(reader, "_wait_for_writer", finish_the_third_time)
    words[st.H_SEQ] = 10
    assert read(reader)[0] == 13
    assert len(waits) == 3


@every_read
def test_a_change_that_never_ends_is_reported(
    reader: SlotTableReader, words: Words, monkeypatch: pytest.MonkeyPatch, read: Read
) -> None:
    monkeypatch.setattr(st, "TORN_READ_S", 0.05)
    words[st.H_SEQ] = 10
    with pytest.raises(AllocatorUnavailable, match=r"in the middle of a change for 0\.05 s"):
        read(reader)
