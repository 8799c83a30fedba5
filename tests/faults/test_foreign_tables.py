"""A slot table that is none of ours lies where ``mambapool allocator`` starts: refused, and left as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from daemons import mambapool

from mambapool.pool import slot_table as st
from mambapool.service.table_writer import SlotTableWriter

SLOTS = 8

Damage = Callable[[bytes], bytes]


def with_word(address: int, value: int) -> Damage:
    """The table with another word in its header."""
    return lambda table: table[: address * 8] + value.to_bytes(8, "little") + table[address * 8 + 8 :]


DAMAGES: dict[str, tuple[Damage, str]] = {
    "foreign": (lambda table: b"#!/bin/sh\n" * 1000, "is no slot table"),
    "of an old version": (with_word(st.H_VERSION, 0), "has layout version 0, this process reads"),
    "truncated": (lambda table: table[:-4096], "bytes, its header says"),
    "of another pool": (with_word(st.H_DIGEST, 1), "is of another geometry"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_it_is_refused_with_the_reason_and_what_to_do(runtime_dir: Path, kind: str) -> None:
    damage, reason = DAMAGES[kind]
    runtime_dir.mkdir(mode=0o700)
    path = runtime_dir / "default.table"
    layout = st.TableLayout(SLOTS, 4)
    SlotTableWriter.create(path, layout, uuid=b"u" * 16, digest=bytes(16), epoch=7)
    path.write_bytes(damage(path.read_bytes()))
    before = path.read_bytes()
    ended = mambapool("allocator", "--dir", str(runtime_dir), "--slots", str(SLOTS))
    assert ended.returncode == 1
    assert reason in ended.stderr
    assert str(path) in ended.stderr
    assert "remove it if nobody needs it" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert path.read_bytes() == before
