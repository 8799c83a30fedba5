"""Skips everything here, with the reason, where there is no GPU that torch and cuda-bindings can use."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator

import pytest
from gpu_daemons import GpuDaemons
from processes import children, zygote  # noqa: F401  (fixtures)


def _why_not() -> str | None:
    # What an image's torch warns of at its import is not ours.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

    if not torch.cuda.is_available():
        return "needs a GPU and a build of torch for it"
    if importlib.util.find_spec("cuda.bindings") is None:
        return "needs cuda-bindings: pip install 'mambapool[cuda]'"
    return None


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if reason := _why_not():
        pytest.skip(reason)


@pytest.fixture
def gpu_daemons() -> Iterator[GpuDaemons]:
    daemons = GpuDaemons()
    yield daemons
    daemons.close()
