"""The group page: what is written is read back, whole or not at all; and what is none is refused."""

from __future__ import annotations

import multiprocessing
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from mambapool.pool import group_calls
from mambapool.pool import group_page as gp
from mambapool.pool.errors import ConfigError, MambaPoolError, ProtocolError, RuntimeDirError, VersionMismatch
from mambapool.pool.group_calls import call_text, call_word
from mambapool.pool.group_page import ANSWERS, LEAD, LOG, Answer, GroupLayout, GroupPage, check_group_name

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"


@pytest.fixture
def page(tmp_path: Path) -> GroupPage:
    return GroupPage.create(tmp_path / "default.group-7", 7, 3, 100)


@pytest.mark.parametrize(("world_size", "slots"), [(1, 1), (4, 64), (256, 2**20)])
def test_every_part_begins_where_the_one_before_ends(world_size: int, slots: int) -> None:
    layout = GroupLayout(world_size, slots)
    assert layout.rank(0) == 64
    assert layout.log(0) == layout.rank(world_size) == 64 + 16 * world_size
    assert layout.answers == layout.log(world_size) == layout.log(0) + 8192 * world_size
    assert layout.data == layout.answers + 16384
    assert 0 <= layout.size_bytes - layout.data * 8 - layout.data_items * 4 < 4096


def test_the_rings_outlast_the_lead() -> None:
    # Rank 0 writes answer n while the slowest may be reading that of its position, n - LEAD.
    assert ANSWERS > LEAD
    # A rank may have to look at a call that rank 0 made LEAD calls ahead of it, having been LEAD ahead before.
    assert LOG > 2 * LEAD + 2 * 16


def test_a_page_is_what_the_document_says(page: GroupPage) -> None:
    words = memoryview(page.path.read_bytes())[: page.layout.data * 8].cast("Q")
    assert bytes(words[0:1].cast("B")) == b"MAMBAGRP"
    assert words[1:6].tolist() == [1, 7, 3, 100, 0]
    page.join(1, 31, 4311)
    page.form()
    page.ready(31)
    page.end(2, gp.DIED)
    page.set_fence(0, 9)
    page.accuse(1, gp.LAGGED, 2, 55)
    page.log(1, 4097, 0xABC)
    page.write_answer(2050, Answer(0xABC, 0, 5, 0, 0, 0))
    words = memoryview(page.path.read_bytes())[: page.layout.data * 8].cast("Q")
    assert words[5:8].tolist() == [1, 31, 1]
    assert words[64:71].tolist() == [0, 0, 0, 9, 0, 0, 0]
    assert words[80:87].tolist() == [31, 4311, 4097, 0, 0, 2 | 2 << 8, 55]
    assert words[64 + 32 + 4] == 2
    log = 64 + 48 + 8192 + 2
    assert words[log : log + 2].tolist() == [0xABC, (4097 * 0x9E3779B97F4A7C15 % 2**64) ^ 0xABC]
    answer = 64 + 48 + 3 * 8192 + 2 * 8
    fields = [2050, 0xABC, 0, 5, 0, 0, 0]
    assert words[answer : answer + 8].tolist() == [*fields, zlib.crc32(struct.pack("<7Q", *fields))]


def test_a_page_is_complete_when_all_have_joined_and_the_rank_0_that_is_there_is_ready(page: GroupPage) -> None:
    page.join(0, 31, 4311)
    page.ready(31)
    page.join(0, 0, 0)  # it has gone
    page.join(0, 34, 4314)
    page.form()
    assert not page.is_complete()
    page.ready(34)
    assert page.is_complete()


def test_the_kinds_of_calls_are_those_of_the_document() -> None:
    section = DOCUMENT.read_text().split("**Calls.**")[1].split("**Answers**")[0]
    rows = re.findall(r"^\| ([\d, ]+) \| ([^|]+) \|", section, re.MULTILINE)
    numbers = [int(number) for row, _ in rows for number in row.split(",")]
    kinds = ("ALLOC", "BEGIN", "END", "FREE", "CLEAR", "AVAILABLE_SIZE", "FREE_SLOTS", "TRANSFER", "ACCEPT")
    assert numbers == [getattr(group_calls, kind) for kind in kinds] == list(range(1, 10))


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (call_word(group_calls.ALLOC, 3), "alloc(3)"),
        (call_word(group_calls.ALLOC, 3, 1), "alloc(3, timeout=…)"),
        (call_word(group_calls.BEGIN, 64, 1), "alloc_group_begin(64, partial=True)"),
        (call_word(group_calls.END), "alloc_group_end()"),
        (call_word(group_calls.FREE, 1, 17), "free(slot 17)"),
        (call_word(group_calls.FREE, 2, 0xBEEF), "free(2 slots, digest 0000beef)"),
        (call_word(group_calls.CLEAR), "clear()"),
        (call_word(group_calls.AVAILABLE_SIZE), "available_size()"),
        (call_word(group_calls.FREE_SLOTS), "free_slots"),
        (call_word(group_calls.TRANSFER, 2, 1), "transfer(2 slots, digest 00000001)"),
        (call_word(group_calls.ACCEPT), "accept()"),
        (call_word(99), f"call {99 << 56:#x}"),
    ],
)
def test_a_call_can_be_read_back(word: int, text: str) -> None:
    assert call_text(word) == text
    assert word < 2**64


def test_a_call_is_read_by_its_number_alone(page: GroupPage) -> None:
    assert page.logged(0, 1) is None
    for number in range(1, LOG + 3):
        page.log(0, number, number % 5)
    assert page.logged(0, LOG + 2) == (LOG + 2) % 5
    assert page.logged(0, 3) == 3
    assert page.logged(0, 2) is None  # there is another one in its place
    assert page.logged(0, LOG + 3) is None
    assert page.position(0) == LOG + 2


@pytest.mark.parametrize("half", [0, 1])
def test_half_a_call_is_none(page: GroupPage, half: int) -> None:
    page.log(1, 8, 1234)
    at = page.layout.log(1) + 8 * 2 + half
    page.items[at] += 1
    assert page.logged(1, 8) is None


@pytest.mark.parametrize("word", range(8))
def test_an_answer_that_is_seen_in_parts_is_none(page: GroupPage, word: int) -> None:
    answer = Answer(7, 0, 3, 2, 11, 99)
    page.write_answer(5, answer)
    assert page.answer(5) == answer
    page.items[page.layout.answers + 5 * 8 + word] ^= 1 << 40
    assert page.answer(5) is None


def test_an_answer_is_read_by_its_number_alone(page: GroupPage) -> None:
    page.write_answer(5, Answer(7, 0, 3, 0, 0, 0))
    assert page.answer(5 + ANSWERS) is None
    page.write_answer(5 + ANSWERS, Answer(8, 0, 3, 0, 0, 0))
    assert page.answer(5) is None


@pytest.mark.parametrize("place", [0, 5, "wraps", "later"])
def test_data_is_read_whole_also_around_the_end(page: GroupPage, place: int | str) -> None:
    items = page.layout.data_items
    at = {"wraps": items - 3, "later": items * 9 + 2}.get(str(place), place)
    assert isinstance(at, int)
    data = struct.pack("<8i", *range(8))
    page.write_data(at, data)
    answer = Answer(1, 0, 0, 8, at, zlib.crc32(data))
    assert page.data(answer) == data
    page.write_data(at + 7, b"\xff" * 4)
    assert page.data(answer) is None


def test_what_every_rank_has_passed_is_the_least_of_positions_and_fences(page: GroupPage) -> None:
    for rank in range(3):
        page.set_fence(rank, gp.NO_FENCE)
        for number in range(1, 5 + rank):
            page.log(rank, number, 1)
    assert (page.passed(), page.slowest()) == (4, (4, 0))
    page.set_fence(2, 3)  # its GPU is behind
    assert page.passed() == 3


def test_the_first_end_and_the_first_fault_stay(page: GroupPage) -> None:
    page.end(1, gp.LEFT)
    page.end(1, gp.DIED)
    page.accuse(0, gp.DIVERGED, 0, 4)
    page.accuse(0, gp.LAGGED, 1, 5)
    assert page.word(1, gp.R_END) == gp.LEFT
    assert (page.word(0, gp.R_FAULT), page.word(0, gp.R_FAULT_CALL)) == (gp.DIVERGED, 4)


def spoil(word: int, value: int) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(word * 8)
            file.write(value.to_bytes(8, "little"))

    return change


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (spoil(0, 1), ProtocolError, "is no group page"),
        (spoil(1, 2), VersionMismatch, "has layout version 2, this process reads 1"),
        (spoil(3, 0), ProtocolError, "its header says"),
        (spoil(3, 2**40), ProtocolError, "its header says"),
        (spoil(4, 2**30), ProtocolError, "its header says"),
        (lambda path: path.write_bytes(b"x" * 100), ProtocolError, "is no group page: 100 bytes"),
        (lambda path: (path.unlink(), path.mkdir()), MambaPoolError, "group page"),
        (Path.unlink, RuntimeDirError, "cannot open the group page"),
        (lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")), RuntimeDirError, "cannot open"),
    ],
)
def test_what_is_no_page_is_refused_with_its_path(
    page: GroupPage, change: Callable[[Path], object], kind: type[Exception], says: str
) -> None:
    change(page.path)
    with pytest.raises(kind, match=says) as caught:
        GroupPage(page.path)
    assert str(page.path) in str(caught.value)


def test_a_page_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeDirError, match=r"cannot make the group page .*name another directory with --dir"):
        GroupPage.create(tmp_path / "nowhere" / "default.group-1", 1, 2, 8)


@pytest.mark.parametrize("name", ["engine-0", "Qwen3.Next_80B", "g" * 48])
def test_a_name_of_a_group(name: str) -> None:
    assert check_group_name(name) == name


@pytest.mark.parametrize("name", ["", "a b", "ä", "g" * 49, "a/b", 5, None, b"x"])
def test_what_is_no_name_of_a_group(name: object) -> None:
    with pytest.raises(ConfigError, match="group name"):
        check_group_name(name)


def _write_calls(path: Path, count: int) -> None:
    page = GroupPage(path)
    for number in range(1, count + 1):
        data = struct.pack("<6i", *[number] * 6)
        at = number * 6
        page.write_data(at, data)
        page.write_answer(number, Answer(number * 3, 0, 0, 6, at, zlib.crc32(data)))
        page.log(0, number, number * 3)


def test_another_process_reads_what_is_written_or_nothing(page: GroupPage) -> None:
    count = 60_000
    writer = multiprocessing.get_context("spawn").Process(target=_write_calls, args=(page.path, count))
    writer.start()
    seen = 0
    while page.position(0) < count:
        position = page.position(0)
        for number in range(max(position - 3, 1), position + 3):
            assert page.logged(0, number) in (None, number * 3)
            answer = page.answer(number)
            if answer is not None:
                assert answer.call == number * 3
                data = page.data(answer)
                assert data in (None, struct.pack("<6i", *[number] * 6))
                seen += data is not None
    writer.join()
    assert writer.exitcode == 0
    assert seen > 100
