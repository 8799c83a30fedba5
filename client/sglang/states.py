"""SGLang's ``MambaPool`` over a shard that the daemon's keeper holds. The only file that imports SGLang."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MambaPool

from mambapool.client.sglang.allocator import leave_for_allocator
from mambapool.client.sglang.engine import GROUP, POOL, Engine
from mambapool.pool.errors import ConfigError

_log = logging.getLogger("mambapool.sglang")

#: Arguments of SGLang's constructor that make further arrays of ``size + 1`` rows, or another layout.
_REFUSED = ("enable_linear_replayssm", "enable_linear_replayssm_spec", "envelope_layout")


class MappedMambaPool(MambaPool):  # type: ignore[misc]  # SGLang is not there when types are checked
    """SGLang's state pool whose ``conv`` and ``temporal`` are the tensors of a pool of the daemon.

    ``size`` is how many slots this engine has, granted whole; ids are those of the pool, so that arrays have its
    N + 1 rows. What speculative decoding needs besides is SGLang's own, indexed by request.
    """

    mamba_cache: Any

    def __init__(self, *, size: int, device: str, **options: Any) -> None:
        """Attach to pool ``MAMBAPOOL_POOL`` and map this rank's shard.

        Raises :class:`~mambapool.pool.errors.GeometryMismatch`, naming the field, when its states are not those
        of SGLang's model, :class:`~mambapool.pool.errors.ConfigError` for what cannot be mapped, and what
        ``connect`` does.
        """
        if refused := [name for name in _REFUSED if options.get(name)]:
            raise ConfigError(
                f"{', '.join(refused)}: SGLang indexes these arrays by slot, and makes them too short"
            )
        engine = Engine.of_process()
        if engine.world_size > 1 and not engine.named:
            raise ConfigError(f"{engine.world_size} ranks share a pool's slots: name their engine with {GROUP}")
        # SGLang makes everything else, and of these arrays one row, by which theirs are compared and laid out.
        super().__init__(size=0, device=device, **options)
        made = self.mamba_cache
        worker = engine.attach(
            os.environ.get(POOL, "") or "default",
            device=device,
            guarantee=size,
            expect={name: (row.dtype, (row.shape[0], *row.shape[2:])) for name, row in _named(made)},
        )
        mapped = [_laid_out(worker.states[name], row) for name, row in _named(made)]
        self.size = size
        self.mamba_cache = dataclasses.replace(made, conv=mapped[:-1], temporal=mapped[-1])
        #: Slots of the pool, which other engines use too; ids go up to it.
        self.pool_slots = mapped[-1].shape[1] - 1
        self.__dict__.pop("_conv_fuse_ok", None)  # SGLang's, cached for the arrays before
        self._warmup_fused_copy_slot_kernel()
        leave_for_allocator(worker)
        _log.info("SGLang's states: %d of %d slots, session %d", size, self.pool_slots, worker.session)

    def register_slot_state(self, state: Any) -> None:
        """SGLang's side states have ``size + 1`` rows: refused where ids are above ``size``."""
        if self.pool_slots > self.size:
            raise ConfigError(
                f"{type(state).__name__} has {self.size + 1} rows, slots here have ids up to {self.pool_slots}: "
                "give this engine a pool of its own size"
            )
        super().register_slot_state(state)


def _named(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """SGLang's arrays under the names that ``serve --model`` gives to the tensors."""
    several = len(state.conv) > 1
    for index, conv in enumerate(state.conv):
        yield f"conv.{index}" if several else "conv", conv
    yield "temporal", state.temporal


def _laid_out(mapped: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """``mapped`` with the strides that SGLang's own have inside a slot: its CPU kernels want conv transposed."""
    return mapped.as_strided(mapped.shape, (*mapped.stride()[:2], *row.stride()[2:]))
