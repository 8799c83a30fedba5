"""What the replay asks of a connected client: what an engine's scheduler uses, and nothing more.

``mambapool.client.connect`` returns such a worker. The scheduler is written against these protocols, so
that it can also run over a pool that lives in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch


class Allocator(Protocol):
    """The part of ``SlotAllocator`` that a scheduler calls; SGLang's names and meanings."""

    @property
    def size(self) -> int: ...

    def available_size(self) -> int: ...

    def alloc(self, n: int, /) -> torch.Tensor | None: ...

    def alloc_group_begin(self, n: int, /) -> None: ...

    def alloc_group_end(self) -> None: ...

    def free(self, slots: torch.Tensor, /) -> None: ...


class StatePool(Protocol):
    """``copy`` takes slots, and copies whole states."""

    def copy(self, src: torch.Tensor, dst: torch.Tensor, /) -> None: ...


class Worker(Protocol):
    """``messages`` counts what this session has sent so far, requests and one-way messages."""

    @property
    def allocator(self) -> Allocator: ...

    @property
    def states(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def pool(self) -> StatePool: ...

    @property
    def messages(self) -> int: ...
