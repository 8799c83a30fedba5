"""``mambapool bench``: what it prints, and where it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


def bench(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mambapool.service", "bench", *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.heavy
def test_figures_come_as_json_and_what_is_going_on_on_stderr() -> None:
    done = bench(CHECKOUT / "docs", "--quick", "--json", "--goal", "6", "--goal", "11")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert {figure["goal"] for figure in figures} == {6, 11}
    for figure in figures:
        assert list(figure) == ["goal", "name", "value", "limit", "better", "met"]
        assert figure["better"] in ("lower", "higher")
        value, limit = figure["value"], figure["limit"]
        assert figure["met"] is (value <= limit if figure["better"] == "lower" else value >= limit)
    (imports,) = [figure for figure in figures if figure["name"].startswith("imports of torch")]
    assert imports["value"] == 0
    assert "slot_tensors" in done.stderr


@pytest.mark.parametrize("arguments", [(), ("--quick", "--json")])
def test_outside_a_checkout_it_says_so(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = bench(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"{tmp_path} is in none" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_bench_folder_of_somebody_else_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "run.py").write_text("raise SystemExit('somebody else')")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    assert bench(tmp_path).returncode == 2


def test_a_goal_that_there_is_not_is_a_usage_error() -> None:
    done = bench(CHECKOUT, "--goal", "99")
    assert done.returncode == 2
    assert "99" in done.stderr
