"""What callers pass, of connect and of calls: refused with its name and what is accepted, and nothing is changed."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fresh_pool import FreshPool, FreshPoolFactory, ids
from groups import join

from mambapool.client import Worker, connect, connect_async
from mambapool.pool.errors import BadIndexTensor, ConfigError, GeometryMismatch, RuntimeDirError
from mambapool.pool.layout import MAX_SLOTS

#: What no field of a message can hold, or what it is not for.
NO_NUMBERS: tuple[Any, ...] = (-1, 2**63, 2**64, 10**30, 10**5000, -(10**30), 1.5, math.nan, "1", b"1", True, [])
NO_TEXTS: tuple[Any, ...] = ("", "\ud800", "a\0b", "line\nbreak", "\x1b[31m", "x" * 129, "é" * 65, 7, b"name")
NO_TIMEOUTS: tuple[Any, ...] = (math.nan, np.float32("nan"), torch.tensor(math.nan), 10**400, "1", b"1", [])
ENDS_S = 5.0


@pytest.fixture
def pool(fresh_pool: FreshPoolFactory) -> FreshPool:
    return fresh_pool(8)


def asynchronously(directory: Path, **options: Any) -> None:
    async def attach() -> None:
        await (await connect_async(directory, **options)).close()

    asyncio.run(attach())


BOTH = {"connect": connect, "connect_async": asynchronously}


@pytest.mark.parametrize("attach", BOTH.values(), ids=BOTH)
@pytest.mark.parametrize("name", ["guarantee", "limit", "create_slots", "slots", "rank", "world_size"])
def test_a_number_that_is_none_is_refused_with_what_is_accepted(
    pool: FreshPool, attach: Callable[..., object], name: str
) -> None:
    before = pool.status()["holders"]
    for value in NO_NUMBERS:
        with pytest.raises(ConfigError, match=rf"^{name} must be a whole number from [01] to \d+, not .{{1,80}}$"):
            attach(pool.daemon.dir, pool=pool.name, **{name: value})
    assert pool.status()["holders"] == before


@pytest.mark.parametrize("name", ["guarantee", "limit", "slots", "rank", "world_size"])
def test_a_number_may_be_of_any_integer_type(pool: FreshPool, name: str) -> None:
    value = {"guarantee": 2, "limit": 3, "slots": 8, "rank": 0, "world_size": 1}[name]
    for kind in (np.int64, np.uint8, torch.tensor):
        pool.connect(**{name: kind(value)}).close()


def test_the_largest_numbers_are_the_allocators_to_judge(pool: FreshPool) -> None:
    with pytest.raises(GeometryMismatch, match=str(MAX_SLOTS)):
        pool.connect(slots=MAX_SLOTS)
    with pool.connect(limit=MAX_SLOTS) as worker:
        assert ids(worker.allocator.alloc(8)) == list(range(1, 9))


@pytest.mark.parametrize("attach", BOTH.values(), ids=BOTH)
def test_a_name_that_no_terminal_can_show_is_refused(pool: FreshPool, attach: Callable[..., object]) -> None:
    for name in NO_TEXTS:
        with pytest.raises(ConfigError, match=r"^name must be 1 to 128 bytes of printable text, not "):
            attach(pool.daemon.dir, pool=pool.name, name=name)
    with pool.connect(name="é" * 64) as worker:
        assert pool.holder(worker)["name"] == "é" * 64


@pytest.mark.parametrize("script", ["s" * 250 + ".py", "é" * 120, "a\nb.py", "\udcff.py", ""])
def test_a_session_gets_a_name_whatever_its_script_is_called(
    pool: FreshPool, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(sys, "argv", [f"/some/where/{script}" if script else ""])
    with pool.connect(name=None) as worker:
        name = pool.holder(worker)["name"]
    assert name.endswith(f"-{os.getpid()}")
    assert name[:3] in ("sss", "ééé", "a?b", "?.p", "pyt")


@pytest.mark.parametrize(
    "expect",
    [
        ["s"],
        "conv",
        7,
        {"conv": ("bfloat16", (10**30,))},
        {"conv": ("bfloat16", (-1,))},
        {"conv": ("bfloat16", (math.inf,))},
        {"conv": ("bfloat16", "12")},
        {"conv": ("\ud800", (1,))},
        {"\ud800": ("bfloat16", (1,))},
        {7: ("bfloat16", (1,))},
    ],
    ids=ascii,
)
@pytest.mark.parametrize("attach", BOTH.values(), ids=BOTH)
def test_an_expectation_that_is_none_says_what_to_pass(
    pool: FreshPool, attach: Callable[..., object], expect: Any
) -> None:
    with pytest.raises(GeometryMismatch, match=r"^expect must be \{name: \(dtype, shape\)\}: "):
        attach(pool.daemon.dir, pool=pool.name, expect=expect)


@pytest.mark.parametrize(
    ("directory", "said"),
    [
        ("/" + "x" * 5000, "has 5016 bytes, the kernel takes 107"),
        ("/" + "x/" * 60, "bytes, the kernel takes 107"),
        ("/tmp/a\0b", "has a NUL in it"),
        ("/tmp/\ud800", "is not UTF-8"),
        (b"/tmp/\xff".decode(errors="surrogateescape"), "is not UTF-8"),
    ],
    ids=["long", "deep", "NUL", "a half", "bytes"],
)
@pytest.mark.parametrize("attach", BOTH.values(), ids=BOTH)
def test_a_directory_that_no_daemon_can_be_in_is_refused_at_once(
    attach: Callable[..., object], directory: str, said: str
) -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeDirError, match=said):
        attach(directory, timeout=60.0)
    assert time.monotonic() - began < ENDS_S


def test_the_environment_names_no_directory_that_is_too_long_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAMBAPOOL_DIR", "/" + "x" * 5000)
    with pytest.raises(RuntimeDirError, match="the kernel takes 107"):
        connect(timeout=0.1)


def test_an_empty_name_of_a_directory_is_not_the_one_that_one_is_in(
    pool: FreshPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pool.daemon.dir)
    with pytest.raises(ConfigError, match="dir is empty"):
        connect("", pool.name)


@pytest.mark.parametrize("device", ["\ud800", "", "tpu", None, 2.5, b"tpu"], ids=ascii)
def test_a_device_that_is_none_is_refused(pool: FreshPool, device: Any) -> None:
    with pytest.raises(ConfigError, match=r"^device .* cannot be used"):
        pool.connect(device=device)


UNUSUAL: dict[str, Callable[[], torch.Tensor]] = {
    "quantized": lambda: torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 1.0, 0, torch.qint32),
    "one quantized": lambda: torch.quantize_per_tensor(torch.tensor(1.0), 1.0, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([2])]),
}


@pytest.mark.filterwarnings("ignore:.*quantized:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_tensor_whose_values_are_no_plain_integers_is_refused(pool: FreshPool, kind: str) -> None:
    slots = UNUSUAL[kind]()
    worker = pool.connect()
    assert ids(worker.allocator.alloc(2)) == [1, 2]
    with pytest.raises(BadIndexTensor, match=r"^free: .*pass integers, for example a tensor of torch\.int64"):
        worker.allocator.free(slots)
    with pytest.raises(BadIndexTensor, match=r"^transfer: .*pass integers, for example a tensor of torch\.int64"):
        worker.transfer(slots, to=pool.owner.session)
    assert pool.held_by(worker) == {1, 2}


def test_a_receiver_that_no_session_can_be_is_refused_and_the_slots_are_as_they_were(pool: FreshPool) -> None:
    worker, other = pool.connect(), pool.connect()
    slots = worker.allocator.alloc(2)
    assert slots is not None
    for to in (*NO_NUMBERS, None):
        with pytest.raises(ConfigError, match=r"^to must be a whole number from 0 to "):
            worker.transfer(slots, to=to)
    worker.transfer(slots, to=other.session)
    assert ids(other.accept(timeout=ENDS_S)) == [1, 2]


def calls_with_timeout(worker: Worker) -> dict[str, Callable[[Any], object]]:
    return {
        "alloc(1)": lambda timeout: worker.allocator.alloc(1, timeout),
        "alloc(3)": lambda timeout: worker.allocator.alloc(3, timeout=timeout),
        "accept": worker.accept,
    }


@pytest.mark.parametrize("kind", ["plain", "guarantee", "group", "group with a guarantee"])
def test_a_timeout_that_is_no_number_is_refused(pool: FreshPool, kind: str) -> None:
    """With nothing free, and nothing on offer: else there would be nothing to wait for."""
    options = {"guarantee": 4} if "guarantee" in kind else {"limit": 8}
    workers = join(pool, 1, **options) if "group" in kind else [pool.connect(**options)]
    (worker,) = workers
    assert worker.allocator.alloc(worker.allocator.size) is not None
    for call in calls_with_timeout(worker).values():
        for timeout in NO_TIMEOUTS:
            with pytest.raises((ValueError, TypeError), match=r"^timeout must be a number of seconds, not "):
                call(timeout)
        for timeout in (-1, -math.inf, 0, 0.0, np.float32(0.001)):
            assert call(timeout) is None
    worker.allocator.clear()
    for timeout in (math.inf, -math.inf, None):
        assert len(ids(worker.allocator.alloc(1, timeout))) == 1


@pytest.mark.parametrize("guarantee", [0, 4])
def test_a_timeout_that_is_no_number_is_refused_with_await(pool: FreshPool, guarantee: int) -> None:
    async def run() -> None:
        async with await connect_async(pool.daemon.dir, pool=pool.name, guarantee=guarantee) as worker:
            allocator = worker.allocator
            assert await allocator.alloc(allocator.size) is not None
            for call in (lambda timeout: allocator.alloc(1, timeout), worker.accept):
                for timeout in NO_TIMEOUTS:
                    with pytest.raises(
                        (ValueError, TypeError), match=r"^timeout must be a number of seconds, not "
                    ):
                        await asyncio.wait_for(call(timeout), ENDS_S)
                for timeout in (-1, -math.inf, 0, 0.001):
                    assert await asyncio.wait_for(call(timeout), ENDS_S) is None
            await allocator.clear()
            assert len(ids(await asyncio.wait_for(allocator.alloc(1, math.inf), ENDS_S))) == 1
            with pytest.raises(ConfigError, match=r"^to must be a whole number from 0 to "):
                await worker.transfer(torch.tensor([1]), to=10**30)

    asyncio.run(run())


@pytest.mark.parametrize("timeout", [math.nan, math.inf, -1.0, 0, 10**400, "5", None])
def test_connect_takes_no_timeout_but_one_that_ends(pool: FreshPool, timeout: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^timeout must be a number of seconds"):
        pool.connect(timeout=timeout)
