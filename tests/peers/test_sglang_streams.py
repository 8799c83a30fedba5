"""The names by which the adapter finds SGLang's streams are in SGLang's wheel. Read only: its scheduler needs a GPU."""

from __future__ import annotations

import ast

import pytest
from sglang_wheel import WORK, missing

from mambapool.client.sglang import streams

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

SRT = WORK / "wheel/sglang/srt"


def _class(path: str, name: str) -> ast.ClassDef:
    tree = ast.parse((SRT / path).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def _set_on_self(node: ast.AST) -> set[str]:
    """``self.NAME = …``, also annotated, and in tuples."""
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def test_the_scheduler_has_the_streams_and_starts_its_loop_by_the_name_that_is_replaced() -> None:
    scheduler = _class("managers/scheduler.py", "Scheduler")
    assert _set_on_self(scheduler) >= {*streams.OF_SCHEDULER, "tree_cache"}
    functions = [node for node in ast.walk(scheduler) if isinstance(node, ast.FunctionDef)]
    (start,) = [function for function in functions if function.name == "run_event_loop"]
    calls = [node.func for node in ast.walk(start) if isinstance(node, ast.Call)]
    called = [function.id for function in calls if isinstance(function, ast.Name)]
    assert streams.LOOP in called
    assert streams.SCHEDULER == "sglang.srt.managers.scheduler"


def test_hicaches_engine_has_its_two() -> None:
    assert "l2_transfer_engine" in _set_on_self(_class("managers/cache_controller.py", "HiCacheController"))
    assert _set_on_self(_class("mem_cache/l2_transfer.py", "L2TransferEngine")) >= set(streams.OF_HICACHE)
