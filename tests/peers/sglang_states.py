"""SGLang over mapped states, in its wheel: the other side of test_sglang_states.py, which names what to run.

The pool is larger than what SGLang was given, and all of its ids are above its size: whatever indexes an array of
``size + 1`` rows by slot fails.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import sglang_scheduler
import torch
from helpers import new_req, req_slots
from sglang.srt.layers.amx_utils import _init_amx_conv_state
from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator import mamba as allocators
from sglang.srt.plugins import load_plugins

from mambapool.client.sglang import MambaSlotAllocator
from mambapool.client.sglang import engine as places
from mambapool.pool.errors import ConfigError, GeometryMismatch, GuaranteeExceeded

POOL_SLOTS = int(sys.argv[1])
SIZE = sglang_scheduler.SLOTS


@functools.cache
def an_engine() -> Any:
    return sglang_scheduler.Engine(tracks=True, seed=1)


def the_plugin_replaces_what_sglang_makes() -> None:
    assert memory_pool.MambaSlotAllocator is allocators.MambaSlotAllocator is MambaSlotAllocator
    assert memory_pool.HybridReqToTokenPool.mamba_pool_cls.__name__ == "MappedMambaPool"


def arrays_have_the_rows_of_the_pool_and_size_is_what_was_granted() -> None:
    engine = an_engine()
    pool, cache = engine.pool.mamba_pool, engine.pool.mamba_pool.mamba_cache
    assert [tuple(conv.shape) for conv in cache.conv] == [(1, POOL_SLOTS + 1, 288, 3)]
    assert tuple(cache.temporal.shape) == (1, POOL_SLOTS + 1, 2, 16, 16)
    assert cache.intermediate_ssm.shape[:2] == (1, 4 * sglang_scheduler.REQUESTS + 1)
    assert pool.size == engine.pool.mamba_allocator.size == SIZE
    assert min(engine.slots) > SIZE
    assert len(engine.slots) == SIZE


def the_scheduler_runs_on_ids_above_its_size() -> None:
    engine = an_engine()
    for _ in range(8):
        engine.prepare()
        engine.step()
        engine.check()


def the_idle_check_finds_no_leak_and_finds_one() -> None:
    engine = an_engine()
    allocator, cache = engine.pool.mamba_allocator, engine.cache

    def leak() -> bool:
        stats = SimpleNamespace(
            mamba_available_size=allocator.available_size(), mamba_evictable_size=cache.mamba_evictable_size()
        )
        observer = SimpleNamespace(session_held_mamba_slots=lambda: 0)
        checker = SimpleNamespace(
            req_to_token_pool=engine.pool,
            tree_cache=cache,
            pool_stats_observer=observer,
            token_to_kv_pool_allocator=engine.tokens,
            _check_pool_invariant=SchedulerInvariantChecker._check_pool_invariant,
        )
        found, _message = SchedulerInvariantChecker._check_mamba_pool(checker, stats)
        return bool(found)

    assert not leak()
    lost = allocator.alloc(1)
    assert leak()
    allocator.free(lost)
    assert not leak()


def states_are_written_copied_cleared_and_saved() -> None:
    pool = an_engine().pool
    request = new_req([1, 2, 3])
    pool.alloc([request])
    slot, track, _ = req_slots(request)
    for tensor in (*pool.mamba_pool.mamba_cache.conv, pool.mamba_pool.mamba_cache.temporal):
        tensor[:, slot] = slot % 251
        tensor[:, track] = 3
    here, there = torch.tensor([slot]), torch.tensor([track])
    saved = pool.mamba_pool.get_cpu_copy(here)
    pool.copy_mamba_state(here, there)
    assert (pool.mamba2_layer_cache(0).temporal[track] == slot % 251).all()
    pool.mamba_pool.clear_slots(here)
    assert not pool.mamba2_layer_cache(0).conv[0][slot].any()
    pool.mamba_pool.load_cpu_copy(saved, here)
    pointers, lengths, items = pool.get_state_buf_infos()
    assert [length // item for length, item in zip(lengths, items, strict=True)] == [POOL_SLOTS + 1] * 2
    assert pointers[1] == pool.mamba_pool.mamba_cache.temporal.data_ptr()
    print(slot, track, slot % 251)  # for the other process to look at


def a_layout_of_sglangs_own_inside_a_slot_is_kept() -> None:
    """As on a CPU with AMX, whose kernels want the window before the channels."""
    memory_pool._is_cpu = memory_pool._cpu_has_amx_support = True
    try:
        conv = _small_pool().mamba_cache.conv[0]
    finally:
        memory_pool._is_cpu = memory_pool._cpu_has_amx_support = False
    own = _init_amx_conv_state([torch.zeros(1, POOL_SLOTS + 1, 288, 3, dtype=torch.bfloat16)])[0]
    assert conv.stride() == own.stride()
    assert conv.shape == own.shape


def what_cannot_be_mapped_is_refused() -> None:
    for name in ("enable_linear_replayssm", "enable_linear_replayssm_spec", "envelope_layout"):
        option: dict[str, Any] = {name: True}
        _raises(ConfigError, name, functools.partial(_small_pool, **option))
    patience, places.TIMEOUT_S = places.TIMEOUT_S, 2.0
    try:
        _raises(GuaranteeExceeded, "guarantee", lambda: _small_pool(size=POOL_SLOTS))
    finally:
        places.TIMEOUT_S = patience
    _raises(GeometryMismatch, "tensor conv, shape", lambda: _small_pool(layers=[0, 1]))
    _raises(ConfigError, "rows", lambda: an_engine().pool.mamba_pool.register_slot_state(SimpleNamespace()))


def an_allocator_of_another_size_is_refused() -> None:
    _small_pool()
    _raises(ConfigError, "size=2", lambda: MambaSlotAllocator(size=2, device="cpu"))


def _small_pool(*, size: int = 4, layers: list[int] | None = None, **options: Any) -> Any:
    shape = SimpleNamespace(conv=[(288, 3)], temporal=(2, 16, 16), disable_conv_window_dedup=True)
    dtype = SimpleNamespace(conv=torch.bfloat16, temporal=torch.bfloat16)
    return memory_pool.HybridReqToTokenPool.mamba_pool_cls(
        size=size,
        spec_state_size=4,
        cache_params=SimpleNamespace(shape=shape, dtype=dtype, is_kda=False),
        mamba_layer_ids=layers or [0],
        device="cpu",
        **options,
    )


def _raises(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    try:
        call()
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert text in said, said


if __name__ == "__main__":
    load_plugins()  # as SGLang does at the start of each of its processes
    for line in sys.stdin:
        try:
            globals()[line.strip()]()
            print("ok", flush=True)
        except Exception:
            print(traceback.format_exc().replace("\n", " | "), flush=True)
