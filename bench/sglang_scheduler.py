"""SGLang's own scheduling of a batch, over a cache whose state slots are all taken. Runs inside SGLang's wheel.

The code is SGLang's: the scheduler's prefill window, prefix matching with copy-on-write, eviction, the request
rows, the checkpoint of every prefill, the release of finished requests. Ours is what stands around it: token
ids, and stand-ins for what needs a model.
"""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import sgl_bootstrap  # noqa: F401  SGLang on a CPU, with stand-ins for packages that need a GPU
import torch
from helpers import new_req, req_slots
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.allocation import alloc_req_slots, alloc_token_slots
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture
from sglang.test.mem_cache_utils import finish_req

REQUESTS = 8

#: State slots; three steps of requests and what earlier ones left in the cache.
SLOTS = 256


class Engine:
    """One cache with its pools. Two of them, given the same seed, do the same."""

    def __init__(self, *, tracks: bool, seed: int) -> None:
        """``tracks``: two further slots per request (SGLang's ``extra_buffer``)."""
        config = CacheConfig(
            components=(ComponentType.FULL, ComponentType.MAMBA),
            enable_mamba_extra_buffer=tracks,
            mamba_cache_size=SLOTS,
            num_layers=2,
            full_attention_layer_ids=(1,),
            kv_size=1 << 16,
            max_num_reqs=4 * REQUESTS,
        )
        self.cache, self.tokens, self.pool = build_fixture(config, tree_core_backend="python")
        self.slots = set(self.pool.mamba_allocator.free_slots.tolist())
        self._random = random.Random(seed)
        self._prompts: list[list[int]] = []
        self._scheduler = _scheduler(self)
        self._queue: list[Any] = []
        # As many slots again as there are: the cache evicts, and so has some order.
        for _ in range(SLOTS // REQUESTS):
            self.prepare()
            self.step()

    def prepare(self) -> None:
        """Have other requests end, until the cache has every slot; queue requests that continue its prompts."""
        while (slot := self.pool.mamba_allocator.alloc(1)) is not None:
            key = RadixKey(array("q", self._new_prompt([])))
            tokens = alloc_token_slots(self.cache, len(key))
            self.cache.insert(InsertParams(key=key, value=tokens.to(torch.int64), mamba_value=slot.clone()))
        prompts = [self._new_prompt(self._random.choice(self._prompts)) for _ in range(REQUESTS)]
        self._queue = [new_req(prompt) for prompt in prompts]
        self._scheduler.waiting_queue = list(self._queue)

    def step(self) -> None:
        """What is measured: schedule the queue, give each request its slots, checkpoint and release it."""
        sglang_scheduler.Scheduler._get_new_batch_prefill_raw(self._scheduler, None, self._scheduler.running)
        alloc_req_slots(self.pool, self._queue, self.cache)
        for request in self._queue:
            self._prefill(request)
        for request in self._queue:
            finish_req(self.cache, request, request.owned_kv_len())
            self.pool.free(request)

    def check(self) -> None:
        """Every slot is free, a request's, or the cache's."""
        found = self.pool.mamba_allocator.free_slots.tolist() + self.cache.all_mamba_values_flatten().tolist()
        found += [slot for request in self._queue for slot in req_slots(request)]
        assert len(found) == len(self.slots) == len(self.slots.intersection(found)), sorted(found)

    def _new_prompt(self, start: list[int]) -> list[int]:
        start = start if len(start) < 60 else []
        prompt = [*start, *(self._random.randrange(30_000) for _ in range(5))]
        self._prompts = [*self._prompts, prompt][-8 * REQUESTS :]
        return prompt

    def _prefill(self, request: Any) -> None:
        length, cached = len(request.origin_input_ids), request.prefix_len
        row = request.kv.req_pool_idx
        self.pool.write((row, slice(cached, length)), alloc_token_slots(self.cache, length - cached))
        request.kv.kv_committed_len = request.kv.kv_allocated_len = length
        request.kv.mamba_last_track_seqlen = length
        self.cache.checkpoint(request, up_to=length)


class _Adder:
    """Admits everybody, as SGLang's does while the budgets of tokens last."""

    def __init__(self, cache: Any) -> None:
        self.can_run_list: list[Any] = []
        self.preempt_list: list[Any] = []
        self.new_chunked_req = None
        self._cache = cache

    def budget_state(self) -> Any:
        return AddReqResult.CONTINUE

    def add_one_req(self, request: Any, **_options: Any) -> Any:
        request.lock = self._cache.lock(request.last_node)
        self.can_run_list.append(request)
        return AddReqResult.CONTINUE


def _scheduler(engine: Engine) -> Any:
    """What ``_get_new_batch_prefill_raw`` reads of its scheduler; the batch that it makes for a model is left out."""
    nobody = SimpleNamespace(reqs=[], is_empty=lambda: True, batch_is_full=False)
    batch = SimpleNamespace(prepare_for_extend=lambda: None)
    sglang_scheduler.ScheduleBatch = SimpleNamespace(init_new=lambda *_a, **_k: batch)
    sglang_scheduler.PrefillStats = SimpleNamespace(from_adder=lambda *_a, **_k: None)
    sglang_scheduler.set_time_batch = lambda *_a: None
    off = dict.fromkeys(
        (
            "enable_priority_preemption", "is_hybrid_swa", "enable_lora", "is_mixed_chunk", "enable_hicache_storage",
            "enable_lmcache", "enable_hierarchical_cache", "enable_unified_cache_external_linker",
            "enable_priority_scheduling", "enable_overlap",
        ),
        False,
    )  # fmt: skip
    none = dict.fromkeys(
        (
            "chunked_req", "min_free_slots_delayer", "chunked_prefill_size", "dynamic_chunk_sizer", "model_config",
            "spec_algorithm", "hisparse_coordinator", "dllm_config", "priority_scheduling_preemption_threshold",
            "processed_tokens_counter", "page_size", "max_prefill_tokens", "max_running_requests",
            "truncation_align_size", "token_to_kv_pool_allocator",
        )
    )  # fmt: skip
    model_runner = SimpleNamespace(attn_backend=None, prefill_aware_swa=False)
    return SimpleNamespace(
        **off,
        **none,
        running=nobody,
        req_to_token_pool=engine.pool,
        tree_cache=engine.cache,
        max_prefill_bs=REQUESTS,
        grammar_manager=SimpleNamespace(has_waiting_grammars=lambda: False),
        policy=SimpleNamespace(calc_priority=lambda *_a, **_k: None),
        new_token_ratio_tracker=SimpleNamespace(current=1.0),
        tp_worker=SimpleNamespace(model_runner=model_runner),
        load_inquirer=SimpleNamespace(_get_num_pending_tokens=lambda **_k: 0),
        get_num_allocatable_reqs=lambda *_a, **_k: REQUESTS + 1,
        get_prefill_adder_class=lambda: lambda *_a, **_k: _Adder(engine.cache),
        _prefetch_after_device_hit_loss=lambda _request: False,
    )
