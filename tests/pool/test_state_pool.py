from __future__ import annotations

import dataclasses
import gc
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mambapool.pool import state_pool
from mambapool.pool.descriptor import ShardDescriptor
from mambapool.pool.errors import (
    BadIndexTensor,
    ClientClosed,
    ConfigError,
    DuplicateSlot,
    MambaPoolError,
    ProtocolError,
    ReservedSlot,
    SlotOutOfRange,
)
from mambapool.pool.handover import receive_block
from mambapool.pool.keeper import KeeperConfig
from mambapool.pool.layout import Geometry, TensorSpec
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.pool.shm import create_block, map_block
from mambapool.pool.state_pool import StatePool

BLOCK_NAME = "mambapool-states"
SLOTS = 8

Process = subprocess.Popen[str]


@pytest.fixture(scope="module", autouse=True)
def _both_ways_to_copy() -> Iterator[None]:
    """Lets a small pool have a tensor that numpy copies, and one that torch does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_pool, "_PARALLEL_BYTES", 40 * 1024)
        yield


@pytest.fixture
def block(descriptor: ShardDescriptor) -> Iterator[int]:
    fd = create_block(BLOCK_NAME, descriptor.size_bytes)
    yield fd
    os.close(fd)


@pytest.fixture
def pool(descriptor: ShardDescriptor, block: int) -> Iterator[StatePool]:
    with StatePool.attach(descriptor, block) as attached:
        yield attached


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count(f"/memfd:{BLOCK_NAME}")


def number_rows(states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give every row its own content; returns a copy of all of it."""
    for tensor in states.values():
        rows = torch.arange(tensor.shape[1], dtype=tensor.dtype)
        tensor.copy_(rows.reshape(1, -1, *[1] * (tensor.dim() - 2)).expand_as(tensor))
    return {name: tensor.clone() for name, tensor in states.items()}


def assert_states(states: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert states.keys() == expected.keys()
    for name, tensor in states.items():
        assert torch.equal(tensor, expected[name]), name


def test_states_have_the_shapes_and_dtypes_of_the_geometry(pool: StatePool) -> None:
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in pool.states.items()}
    assert described == {
        "conv": (torch.bfloat16, (2, SLOTS + 1, 8, 2)),
        "temporal": (torch.float32, (2, SLOTS + 1, 64, 80)),
    }
    assert all(tensor.is_contiguous() for tensor in pool.states.values())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_dtype_can_be_written_and_read(dtype: str, descriptor: ShardDescriptor) -> None:
    geometry = Geometry((TensorSpec("one", dtype, 3, (5,)), TensorSpec("two", dtype, 1, (7, 2))))
    shard = dataclasses.replace(descriptor, geometry=geometry)
    fd = create_block(BLOCK_NAME, shard.size_bytes)
    first, second = StatePool.attach(shard, fd), StatePool.attach(shard, fd)
    os.close(fd)

    assert_states(second.states, number_rows(first.states))
    assert {tensor.dtype for tensor in first.states.values()} == {getattr(torch, dtype)}


def test_tensors_lie_at_their_offsets_in_one_mapping(pool: StatePool, descriptor: ShardDescriptor) -> None:
    addresses = {name: tensor.data_ptr() for name, tensor in pool.states.items()}
    start = addresses["conv"] - descriptor.tensors[0].offset
    assert mappings() == 1
    for placed in descriptor.tensors:
        assert addresses[placed.name] == start + placed.offset


def test_states_cannot_be_replaced_by_other_tensors(pool: StatePool) -> None:
    with pytest.raises(TypeError):
        pool.states["conv"] = torch.zeros(1)  # type: ignore[index]


@pytest.mark.parametrize(
    "keep",
    [
        lambda states: states["conv"],
        lambda states: states["temporal"][1, 3, 5:6, 7:8],
        lambda states: states["temporal"][1].numpy()[2:],
        lambda states: memoryview(states["temporal"].numpy()),
        lambda states: torch.utils.dlpack.from_dlpack(states["conv"]),
        lambda states: states["conv"].untyped_storage(),
        lambda states: states,
    ],
    ids=["tensor", "view", "numpy view", "buffer", "dlpack", "storage", "mapping of names"],
)
def test_the_mapping_lives_exactly_as_long_as_anything_over_it(
    keep: Callable[[Mapping[str, torch.Tensor]], Any], descriptor: ShardDescriptor, block: int
) -> None:
    pool = StatePool.attach(descriptor, block)
    kept = keep(pool.states)
    read = repr(kept)
    gc.collect()  # what tests before this one left
    fds = len(os.listdir("/proc/self/fd"))

    pool.close()
    gc.collect()
    assert mappings() == 1
    assert repr(kept) == read

    del kept
    gc.collect()
    assert mappings() == 0
    assert len(os.listdir("/proc/self/fd")) == fds - 1, "the mapping has a descriptor of its own"


def test_nobody_can_unmap_the_memory_under_a_tensor(
    descriptor: ShardDescriptor, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = []

    def map_and_keep(fd: int, size_bytes: int) -> mmap.mmap:
        mapped.append(map_block(fd, size_bytes))
        return mapped[0]

    monkeypatch.setattr(state_pool, "map_block", map_and_keep)
    kept = StatePool.attach(descriptor, block).states["conv"]

    with pytest.raises(BufferError):
        mapped[0].close()

    del kept
    mapped[0].close()


def test_a_view_that_outlives_the_pool_is_still_shared(descriptor: ShardDescriptor, block: int) -> None:
    first, second = StatePool.attach(descriptor, block), StatePool.attach(descriptor, block)
    kept = first.states["temporal"][0, 3]
    first.close()
    del first
    gc.collect()

    second.states["temporal"][0, 3] = 7
    assert bool((kept == 7).all())
    kept.fill_(8)
    assert bool((second.states["temporal"][0, 3] == 8).all())


@pytest.mark.parametrize("slots", [[3, 1], torch.tensor([3, 1], dtype=torch.int16), (1, 3, 3)])
def test_clear_sets_exactly_these_states_to_zero(slots: Any, pool: StatePool) -> None:
    expected = number_rows(pool.states)
    for tensor in expected.values():
        tensor[:, [1, 3]] = 0

    pool.clear(slots)

    assert_states(pool.states, expected)


def test_clearing_or_copying_nothing_changes_nothing(pool: StatePool) -> None:
    expected = number_rows(pool.states)
    pool.clear([])
    pool.copy(torch.tensor([]), [])
    assert_states(pool.states, expected)


@given(
    src=st.lists(st.integers(1, SLOTS), max_size=SLOTS),
    dst=st.permutations(range(1, SLOTS + 1)),
)
def test_copy_reads_all_before_it_writes(copied: StatePool, src: list[int], dst: list[int]) -> None:
    expected = number_rows(copied.states)
    to = dst[: len(src)]
    for tensor in expected.values():
        tensor[:, to] = tensor[:, src]

    copied.copy(torch.tensor(src), torch.tensor(to, dtype=torch.int32))

    assert_states(copied.states, expected)


@pytest.fixture(scope="module")
def copied(_both_ways_to_copy: None) -> Iterator[StatePool]:
    """One pool for all examples: each gives every row new content first."""
    geometry = Geometry((TensorSpec.parse("conv=bfloat16:2x8x2"), TensorSpec.parse("temporal=float32:2x64x80")))
    shard = ShardDescriptor("default", bytes(16), 0, 1, SLOTS, geometry, 1)
    fd = create_block("mambapool-copied", shard.size_bytes)
    with StatePool.attach(shard, fd) as attached:
        os.close(fd)
        yield attached


@pytest.mark.parametrize(
    ("src", "dst", "error", "says"),
    [
        ([1], [0], ReservedSlot, "dst: slot 0 is reserved"),
        ([0], [1], ReservedSlot, "src: slot 0 is reserved"),
        ([9], [1], SlotOutOfRange, "src: slot 9 is not one of 1 to 8"),
        ([1], [-1], SlotOutOfRange, "dst: slot -1 is not one of 1 to 8"),
        ([1, 2], [3, 3], DuplicateSlot, "dst: slot 3 is named more than once"),
        ([1, 2], [3], ValueError, "src has 2 slots, dst has 1"),
        ([1.5], [3], BadIndexTensor, "src: 1.5"),
        (torch.tensor([True]), [3], BadIndexTensor, "src: a mask"),
        ([1], torch.tensor([[3]]), BadIndexTensor, r"dst: a tensor of shape \(1, 1\)"),
    ],
)
def test_a_copy_that_is_refused_changes_nothing(
    src: Any, dst: Any, error: type[Exception], says: str, pool: StatePool
) -> None:
    expected = number_rows(pool.states)
    with pytest.raises(error, match=says):
        pool.copy(src, dst)
    assert_states(pool.states, expected)


@pytest.mark.parametrize(
    ("slots", "error"),
    [([1, 0], ReservedSlot), ([1, 9], SlotOutOfRange), (torch.tensor([1.0]), BadIndexTensor)],
)
def test_a_clear_that_is_refused_changes_nothing(slots: Any, error: type[MambaPoolError], pool: StatePool) -> None:
    expected = number_rows(pool.states)
    with pytest.raises(error, match=r"^slots: "):
        pool.clear(slots)
    assert_states(pool.states, expected)


def test_a_closed_pool_says_so_and_closes_again(pool: StatePool) -> None:
    pool.close()
    pool.close()
    for use in (lambda: pool.states, lambda: pool.clear([1]), lambda: pool.copy([1], [2])):
        with pytest.raises(ClientClosed, match="pool default is closed"):
            use()


def test_repr_shows_what_is_mapped(pool: StatePool, descriptor: ShardDescriptor) -> None:
    assert repr(pool) == f"<StatePool default rank 0: 8 slots, {descriptor.size_bytes} bytes>"
    pool.close()
    assert repr(pool) == "<StatePool default rank 0: closed>"


def test_another_device_is_refused(descriptor: ShardDescriptor, block: int) -> None:
    with pytest.raises(ConfigError, match="device 'cuda:0': pool default is in host memory, pass 'cpu'"):
        StatePool.attach(descriptor, block, device="cuda:0")
    assert mappings() == 0


def test_a_block_that_is_not_the_descriptors_is_refused(descriptor: ShardDescriptor) -> None:
    fd = create_block(BLOCK_NAME, descriptor.size_bytes + 4096)
    with pytest.raises(ProtocolError, match="its descriptor says"):
        StatePool.attach(descriptor, fd)
    os.close(fd)


def test_two_processes_see_what_the_other_writes(
    start_keeper: Callable[..., Process], python: Callable[..., Process], config: KeeperConfig
) -> None:
    start_keeper(config)
    program = """
import os, sys
from pathlib import Path
import torch
from mambapool.pool.errors import ForkedClient
from mambapool.pool.handover import receive_block
from mambapool.pool.state_pool import StatePool
shard, fd = receive_block(Path(sys.argv[1]), timeout=10)
pool = StatePool.attach(shard, fd)
os.close(fd)
print("attached", flush=True)
input()
pool.copy([2], [5])
pool.clear([2])
if os.fork() == 0:
    try:
        pool.clear([5])
    except ForkedClient as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    path = RuntimeDir(config.dir).keeper_socket(config.pool, config.rank)
    other = python(program, path)
    assert other.stdout is not None
    assert other.stdout.readline() == "attached\n"
    shard, fd = receive_block(path, timeout=5)
    with StatePool.attach(shard, fd) as pool:
        os.close(fd)
        expected = number_rows(pool.states)
        for tensor in expected.values():
            tensor[:, 5] = tensor[:, 2]
            tensor[:, 2] = 0

        output, errors = other.communicate("\n")

        assert (output, errors) == ("this pool was mapped before a fork: attach again in the child\n", "")
        assert_states(pool.states, expected)
