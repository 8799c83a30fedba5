"""What ``serve`` is told by flags, environment, file and defaults, without running it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mambapool.pool.layout import Geometry, TensorSpec
from mambapool.service import serve
from mambapool.service.cli import command_line
from mambapool.service.config import PoolConfig
from mambapool.service.serve import ServeConfig

CONV, TEMPORAL = "conv=bfloat16:4x96x3", "temporal=float32:4x2x16x8"
STATE = Geometry((TensorSpec.parse(CONV), TensorSpec.parse(TEMPORAL)))

Told = Callable[..., ServeConfig]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What ``mambapool serve ARGUMENTS`` would run, in an environment of its own."""
    for name in ("DIR", "SLOTS", "STATE", "POOL", "MODEL", "TP_SIZE", "MAX_SESSIONS", "CONFIG", "DEVICE"):
        monkeypatch.delenv(f"MAMBAPOOL_{name}", raising=False)
    found: list[ServeConfig] = []
    monkeypatch.setattr(serve, "serve", lambda config, _announce: found.append(config))

    def run(*arguments: Any, **environment: str) -> ServeConfig:
        CliRunner().invoke(command_line, ["serve", *map(str, arguments)], env=environment, catch_exceptions=False)
        return found.pop()

    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pools.toml"
    path.write_text(f'dir = "/file"\nmax-sessions = 4\n[[pool]]\npool = "a"\nslots = 8\nstate = ["{CONV}"]\n')
    return path


def test_without_flags_there_is_no_pool_and_every_default(told: Told) -> None:
    assert told() == ServeConfig(None, (), 1024)


def test_slots_alone_make_an_allocator_only_pool(told: Told) -> None:
    assert told("--slots", 64).pools == (PoolConfig("default", 64, None),)


def test_flags_describe_one_pool(told: Told) -> None:
    described = told("--pool", "a", "--slots", 8, "--state", CONV, "--state", TEMPORAL, "--tp-size", 2)
    assert described.pools == (PoolConfig("a", 8, STATE, 2),)


def test_the_environment_says_the_same_as_flags(told: Told) -> None:
    described = told(
        MAMBAPOOL_DIR="/env",
        MAMBAPOOL_POOL="a",
        MAMBAPOOL_SLOTS="8",
        MAMBAPOOL_STATE=f"{CONV}  {TEMPORAL}",
        MAMBAPOOL_TP_SIZE="2",
        MAMBAPOOL_MAX_SESSIONS="16",
    )
    assert described == ServeConfig("/env", (PoolConfig("a", 8, STATE, 2),), 16)


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(told: Told, file: Path) -> None:
    flags = ("--dir", "/flag", "--slots", 32, "--max-sessions", 7)
    environment = {"MAMBAPOOL_DIR": "/env", "MAMBAPOOL_SLOTS": "16", "MAMBAPOOL_MAX_SESSIONS": "6"}
    conv = Geometry(STATE.tensors[:1])

    assert told("--config", file) == ServeConfig("/file", (PoolConfig("a", 8, conv),), 4)
    assert told("--config", file, **environment) == ServeConfig("/env", (PoolConfig("a", 16, conv),), 6)
    assert told("--config", file, *flags, **environment) == ServeConfig("/flag", (PoolConfig("a", 32, conv),), 7)
    assert told(*flags, **environment) == ServeConfig("/flag", (PoolConfig("default", 32),), 7)


def test_the_file_itself_can_be_named_in_the_environment(told: Told, file: Path) -> None:
    assert told(MAMBAPOOL_CONFIG=str(file)) == told("--config", file)


def test_an_empty_variable_is_none(told: Told) -> None:
    assert told(MAMBAPOOL_DIR="", MAMBAPOOL_SLOTS="", MAMBAPOOL_STATE="") == ServeConfig()
