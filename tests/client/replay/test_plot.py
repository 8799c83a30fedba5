"""The picture of a replay: what it shows, and what there has to be for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mambapool.client.replay import plot
from mambapool.client.replay.plot import check_plot
from mambapool.client.replay.result import SchedulerResult
from mambapool.client.replay.summary import ReplaySummary
from mambapool.client.replay.usage import HeldTimeline
from mambapool.pool.errors import ConfigError


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def result(
    *changes: tuple[float, int], end_ms: float, waiting: tuple[tuple[float, int], ...] = ()
) -> SchedulerResult:
    held, waits = HeldTimeline(list(changes), end_ms), HeldTimeline(list(waiting), end_ms)
    return SchedulerResult(1, 0, [], 1, 1, len(waiting), [], held, waits)


def summary(**changes: Any) -> ReplaySummary:
    usual: dict[str, Any] = dict.fromkeys(ReplaySummary.__dataclass_fields__, 0)
    return ReplaySummary(
        **{
            **usual,
            "slots": 16,
            "peak_held": 9,
            "partitioned_need": 12,
            "findings": (),
            "in_step": True,
            **changes,
        }
    )


def test_a_series_has_the_mean_of_each_interval() -> None:
    edges = np.array([0.0, 10.0, 20.0, 30.0, 40.0])
    timeline = HeldTimeline([(5.0, 4), (20.0, 2), (24.0, 0)], 35.0)
    assert plot._means(timeline, edges).tolist() == [2.0, 4.0, 0.8, 0.0]
    assert plot._means(HeldTimeline([(0.0, 3)], 40.0), edges).tolist() == [3.0] * 4
    assert plot._means(HeldTimeline([(0.0, 3)], 15.0), edges).tolist() == [3.0, 1.5, 0.0, 0.0]
    assert plot._means(HeldTimeline(), edges).tolist() == [0.0] * 4


@pytest.mark.skipif(not has_matplotlib(), reason="needs matplotlib (mambapool[plot])")
@pytest.mark.parametrize("waits", [0, 3])
@pytest.mark.parametrize("kind", plot.KINDS)
def test_a_picture_of_any_kind_is_drawn(tmp_path: Path, kind: str, waits: int) -> None:
    from mambapool.client.replay.plot import draw_plot

    path = tmp_path / f"picture{kind}"
    check_plot(path)
    results = [
        result((0.0, 3), (500.0, 9), (1500.0, 3), end_ms=2000.0, waiting=((100.0, 2), (700.0, 0))),
        result((300.0, 3), end_ms=1000.0),
    ]
    draw_plot(path, summary(waits=waits, in_step=not waits), results, ["a.jsonl", "b" * 50])
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    assert path.read_bytes().startswith(starts[kind])
    if kind == ".svg":
        text = path.read_text()
        assert ("none waited" in text) == (not waits)
        for said in ("scheduler 0: a.jsonl", "slots held", "minutes of the trace"):
            assert said in text


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"--plot needs matplotlib: pip install 'mambapool\[plot\]'"):
        check_plot(tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_a_place_for_no_picture_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    (tmp_path / "folder.png").mkdir()
    for path, said in (
        (tmp_path / "x.gif", r"expected a name that ends in \.png, \.svg, \.pdf"),
        (tmp_path / "x", "expected a name"),
        (tmp_path / "none" / "x.png", "there is no directory"),
        (tmp_path / "folder.png", "is a directory"),
        (Path("/proc/x.png"), "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_plot(path)
