"""``mambapool config show``: what serve would run, and where each value comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mambapool.service.cli import command_line

CONV = "conv=bfloat16:4x96x3"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pools.toml"
    path.write_text(
        f'dir = "/file"\nmax-sessions = 4\n[[pool]]\npool = "a"\nslots = 8\nstate = ["{CONV}"]\n'
        '[[pool]]\npool = "b"\nslots = 9\n'
    )
    return path


def shown(*arguments: Any, **environment: str) -> dict[tuple[str | None, str], tuple[Any, str, str | None]]:
    """(pool, setting) → (value, kind of source, its name)."""
    result = CliRunner().invoke(
        command_line, ["config", "show", "--json", *map(str, arguments)], env=environment, catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)
    assert len({(row["pool"], row["setting"]) for row in rows}) == len(rows)
    return {(row["pool"], row["setting"]): (row["value"], row["source"], row["from"]) for row in rows}


def test_without_anything_every_value_is_the_default() -> None:
    found = shown(XDG_RUNTIME_DIR="/xdg")
    assert found == {
        (None, "dir"): ("/xdg/mambapool", "default", None),
        (None, "max-sessions"): (1024, "default", None),
        (None, "max-waiters"): (1024, "default", None),
        (None, "quarantine"): ("1s", "default", None),
    }


def test_flag_environment_file_and_default_are_told_apart(file: Path) -> None:
    found = shown(
        *("--config", file, "--pool", "a", "--slots", 32, "--max-waiters", 5),
        MAMBAPOOL_TP_SIZE="2",
        MAMBAPOOL_DIR="/env",
    )
    assert found[None, "dir"] == ("/env", "environment", "MAMBAPOOL_DIR")
    assert found[None, "max-sessions"] == (4, "file", str(file))
    assert found[None, "max-waiters"] == (5, "flag", "--max-waiters")
    assert found["a", "pool"] == ("a", "flag", "--pool")
    assert found["a", "slots"] == (32, "flag", "--slots")
    assert found["a", "tp-size"] == (2, "environment", "MAMBAPOOL_TP_SIZE")
    assert found["a", "state"] == ([CONV], "file", str(file))
    assert found["a", "device"] == ("cpu", "default", None)
    assert found["a", "model"] == (None, "default", None)
    assert found["b", "slots"] == (9, "file", str(file)), "flags are the pool's that they name"
    assert found["b", "pool"] == ("b", "file", str(file))
    assert found["b", "tp-size"] == (1, "default", None)


def test_a_flag_that_says_the_same_as_the_file_is_a_flag(file: Path) -> None:
    found = shown("--config", file, "--pool", "b", "--slots", 9)
    assert found["b", "slots"] == (9, "flag", "--slots")
    assert found["a", "slots"] == (8, "file", str(file))


def test_a_pool_of_flags_is_shown_without_a_file() -> None:
    found = shown("--slots", 4, MAMBAPOOL_STATE=f"{CONV} t=float32:1x2")
    assert found["default", "slots"] == (4, "flag", "--slots")
    assert found["default", "state"] == ([CONV, "t=float32:1x2"], "environment", "MAMBAPOOL_STATE")
    assert found["default", "pool"] == ("default", "default", None)


def test_the_file_itself_may_be_named_by_the_environment(file: Path) -> None:
    assert shown(MAMBAPOOL_CONFIG=str(file))["a", "slots"] == (8, "file", str(file))


def test_a_quarantine_is_shown_as_it_can_be_written(file: Path) -> None:
    assert shown("--quarantine", "500ms")[None, "quarantine"] == ("0.5s", "flag", "--quarantine")
    file.write_text('quarantine = "2m"')
    assert shown("--config", file)[None, "quarantine"] == ("2m", "file", str(file))
    assert shown("--config", file, "--quarantine", "3s")[None, "quarantine"] == ("3s", "flag", "--quarantine")


def test_people_get_a_table(file: Path) -> None:
    result = CliRunner().invoke(command_line, ["config", "show", "--config", str(file), "--max-waiters", "5"])
    lines = [line.split() for line in result.output.splitlines()]
    assert lines[0] == ["pool", "setting", "value", "from"]
    assert ["max-waiters", "5", "flag", "--max-waiters"] in lines
    assert ["a", "state", CONV, "file", str(file)] in lines
    assert ["b", "state", "-", "default"] in lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--slots", "0"), "slots 0"),
        (("--max-sessions", "0"), "sessions 0"),
        (("--slots", "4", "--tp-size", "2"), "--tp-size needs"),
        (("--config", "/nothing.toml"), "/nothing.toml: No such file"),
        (("--slots", "4", "--device", "cuda"), "--device cuda"),
    ],
)
def test_what_serve_would_refuse_is_refused(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(command_line, ["config", "show", *arguments])
    assert result.exception is not None
    assert said in str(result.exception)
    assert not result.stdout
