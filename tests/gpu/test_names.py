"""Every name of torch and of cuda-bindings that the GPU path uses exists in the installed versions. Needs no GPU."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SOURCES = [
    *(ROOT / "tests/gpu").glob("*.py"),
    *(ROOT / "pool").glob("cuda*.py"),
    *(ROOT / "client").glob("*.py"),
    ROOT / "service/doctor_gpu.py",
]


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    """Not here: this is about names."""


def _found(pattern: str) -> set[str]:
    names: set[str] = set()
    for source in SOURCES:
        names |= set(re.findall(pattern, source.read_text()))
    return names


def test_names_of_torch_exist() -> None:
    import torch

    names = _found(r"\btorch\.cuda\.([A-Za-z_]+)")
    assert {"Stream", "Event", "_sleep", "set_sync_debug_mode", "is_current_stream_capturing"} <= names
    assert sorted(name for name in names if not hasattr(torch.cuda, name)) == []


def test_names_of_cuda_bindings_exist() -> None:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        pytest.skip("needs cuda-bindings")
    from cuda.bindings import driver

    functions = _found(r'"(cu[A-Z][A-Za-z]+)"')
    attributes = _found(r"bindings\(?\)?\.(CU[A-Za-z_]+)")
    assert {"cuIpcOpenMemHandle", "cuCtxRecordEvent", "cuThreadExchangeStreamCaptureMode"} <= functions
    assert {"CUstream", "CUevent", "CUipcMemHandle"} <= attributes
    assert sorted(name for name in functions | attributes if not hasattr(driver, name)) == []
    constants = _found(r"\b(CU_[A-Z_]+)\b")
    kinds = [driver.CUipcMem_flags, driver.CUstreamCaptureMode, driver.CUdevice_attribute]
    assert sorted(name for name in constants if not any(hasattr(kind, name) for kind in kinds)) == []
