"""Every name of torch and of cuda-bindings that the GPU path uses exists in the installed versions. Needs no GPU.

``TORCH_WHEEL=FILE`` looks into the wheel of another torch, which is not installed: its sources and type stubs are read.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SOURCES = [
    *(ROOT / "tests/gpu").glob("*.py"),
    *(ROOT / "pool").glob("cuda*.py"),
    *(ROOT / "client").glob("*.py"),
    *(ROOT / "client/replay").glob("*.py"),
    *(ROOT / "client/sglang").glob("*.py"),
]

WHEEL = os.environ.get("TORCH_WHEEL", "")

#: What :mod:`mambapool.client.fences` asks streams and events for: torch's class, and where it is said.
HANDLES = {"_CudaStreamBase": "cuda_stream", "_CudaEventBase": "cuda_event"}


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


@pytest.mark.skipif(not WHEEL, reason="needs the wheel of another torch: TORCH_WHEEL=FILE")
def test_names_of_another_torch_exist() -> None:
    with zipfile.ZipFile(WHEEL) as wheel:
        cuda, stubs, functions, top, streams = (
            ast.parse(wheel.read(f"torch/{name}"))
            for name in (
                "cuda/__init__.py",
                "_C/__init__.pyi",
                "_C/_VariableFunctions.pyi",
                "__init__.py",
                "cuda/streams.py",
            )
        )
    assert sorted(_found(r"\btorch\.cuda\.([A-Za-z_]+)") - _defined(cuda)) == []
    known = _defined(stubs) | _defined(functions) | _defined(top) | {"cuda"}
    assert sorted(_found(r"\btorch\.([A-Za-z_0-9]+)") - known) == []
    for name, attribute in HANDLES.items():
        assert attribute in _defined(_class(stubs, name))
    assert {"__cuda_stream__", "record_event", "synchronize"} <= _defined(_class(streams, "Stream"))
    assert {"record", "query", "synchronize"} <= _defined(_class(streams, "Event"))


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def _defined(tree: ast.Module | ast.ClassDef) -> set[str]:
    """Names that a module or class binds in its body, also under an ``if``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


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
