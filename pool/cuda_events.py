"""Events of the driver, used again and again: making one is a call that a free should not have to make."""

from __future__ import annotations

from typing import Any

from mambapool.pool.cuda import PrimaryContext, call
from mambapool.pool.cuda_memory import let_go

_DISABLE_TIMING = 2


class Events:
    """Events of one context, destroyed when this object is gone. The caller locks, and makes the context current."""

    def __init__(self, context: PrimaryContext) -> None:
        self._unused: list[Any] = []
        self._made: list[Any] = []
        let_go(self, context, "cuEventDestroy", self._made)

    def take(self) -> Any:
        """One that nobody uses."""
        if self._unused:
            return self._unused.pop()
        event = call("cuEventCreate", _DISABLE_TIMING)
        self._made.append(event)
        return event

    def give_back(self, event: Any) -> None:
        self._unused.append(event)
