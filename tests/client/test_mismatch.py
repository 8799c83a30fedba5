"""A client that expects another pool than there is: told which field differs, before anything is mapped."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from daemons import SMALL_STATE, Daemon, start_daemon

from mambapool.client import connect
from mambapool.pool.errors import ConfigError, GeometryMismatch

#: SMALL_STATE, as a client describes it.
CONV = (torch.bfloat16, (2, 6, 3))
TEMPORAL = (torch.float32, (2, 2, 4, 4))


@pytest.fixture(scope="module")
def with_states() -> Iterator[Daemon]:
    """Eight slots, two ranks."""
    parent = Path(tempfile.mkdtemp(prefix="mambapool-"))
    daemon = start_daemon(parent / "run", slots=8, states=SMALL_STATE, options=("--tp-size", "2"))
    yield daemon
    daemon.close()
    shutil.rmtree(parent)


def mapped() -> set[str]:
    """This process's mappings of shards and slot tables."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "memfd:" in line or line.endswith(".table")}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"slots": 9}, ("slots", "9", "8")),
        ({"create_slots": 7}, ("create_slots", "7", "8")),
        ({"rank": 2}, ("rank", "2", "0 to 1")),
        ({"expect": {"conv": (torch.float32, (2, 6, 3))}}, ("conv, dtype", "float32", "bfloat16")),
        ({"expect": {"temporal": ("float16", (2, 2, 4, 4))}}, ("temporal, dtype", "float16", "float32")),
        ({"expect": {"conv": (torch.bfloat16, (3, 6, 3))}}, ("conv, shape", "[3, 6, 3]", "[2, 6, 3]")),
        ({"expect": {"conv": (torch.bfloat16, (2, 6, 4))}}, ("conv, shape", "[2, 6, 4]", "[2, 6, 3]")),
        ({"expect": {"conv": CONV, "temporal": (torch.float32, (2, 2, 16))}}, ("temporal, shape", "[2, 2, 16]")),
        ({"expect": {"ssm": TEMPORAL}}, ("ssm", "conv, temporal")),
    ],
)
def test_the_field_and_both_values_are_named_and_nothing_is_mapped(
    with_states: Daemon, options: dict[str, Any], named: tuple[str, ...]
) -> None:
    before = mapped()
    with pytest.raises(GeometryMismatch) as caught:
        connect(with_states.dir, timeout=1.0, **options)
    assert all(word in str(caught.value) for word in named), str(caught.value)
    assert mapped() <= before
    assert with_states.pool()["holders"] == []


def test_what_agrees_is_mapped(with_states: Daemon) -> None:
    before = mapped()
    expect: dict[str, Any] = {"conv": CONV, "temporal": ("float32", TEMPORAL[1])}
    with connect(with_states.dir, rank=1, slots=8, create_slots=8, expect=expect) as worker:
        assert len(mapped() - before) == 2
        assert {name: (t.dtype, tuple(t.shape)) for name, t in worker.states.items()} == {
            "conv": (torch.bfloat16, (2, 9, 6, 3)),
            "temporal": (torch.float32, (2, 9, 2, 4, 4)),
        }


def test_a_device_that_the_pool_is_not_on_is_refused(with_states: Daemon) -> None:
    before = mapped()
    with pytest.raises(ConfigError, match=r"device 'cuda:0'.*pass 'cpu'"):
        connect(with_states.dir, device="cuda:0", timeout=1.0)
    assert {line for line in mapped() if "memfd:" in line} <= before
    assert with_states.pool()["holders"] == []


@pytest.mark.parametrize("expect", [{"conv": CONV[1]}, {"conv": (torch.bfloat16, None)}, {"conv": None}])
def test_an_expectation_that_is_none_says_what_to_pass(with_states: Daemon, expect: Any) -> None:
    with pytest.raises(GeometryMismatch, match=r"expect must be \{name: \(dtype, shape\)\}"):
        connect(with_states.dir, expect=expect)


@pytest.mark.parametrize("rank", [-1, 2**16 + 1, "0"])
def test_a_rank_that_is_none_is_refused(with_states: Daemon, rank: Any) -> None:
    with pytest.raises(ConfigError, match="rank must be a whole number"):
        connect(with_states.dir, rank=rank)


def test_an_allocator_only_pool_has_no_tensors_to_expect(with_states: Daemon) -> None:
    with (
        connect(with_states.dir, "bare", create_slots=4),
        pytest.raises(GeometryMismatch, match=r"conv.*allocator-only"),
    ):
        connect(with_states.dir, "bare", expect={"conv": CONV})
