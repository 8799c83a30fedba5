"""SGLang on mambapool: its slot allocator, and its state pool, from another process (``docs/sglang.md``).

    from mambapool.client.sglang import install
    install()

Importing this imports neither SGLang nor torch; :func:`install` imports SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mambapool.client.sglang.install import install, plugin

if TYPE_CHECKING:
    from mambapool.client.sglang.allocator import MambaSlotAllocator

__all__ = ["MambaSlotAllocator", "install", "plugin"]


def __getattr__(name: str) -> object:
    if name == "MambaSlotAllocator":
        from mambapool.client.sglang.allocator import MambaSlotAllocator

        return MambaSlotAllocator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
