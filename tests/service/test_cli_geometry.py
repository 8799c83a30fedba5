"""``mambapool geometry`` against the rows that SGLang's own classes computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from daemons import mambapool

from mambapool.pool.errors import ConfigError, MambaPoolError
from mambapool.pool.layout import Geometry, TensorSpec
from mambapool.service.cli import command_line

STATE_SHAPES: list[dict[str, Any]] = json.loads(
    Path(__file__).parents[1].joinpath("data", "state_shapes.json").read_text()
)
ROWS = [
    pytest.param(model["config"], row, id=f"{model['name']}, tp {row['tp_size']}")
    for model in STATE_SHAPES
    for row in model["expected"]
]
QWEN3_NEXT: dict[str, Any] = STATE_SHAPES[0]["config"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Qwen3-Next's config.json."""
    return write(tmp_path, QWEN3_NEXT)


def write(directory: Path, config: dict[str, Any]) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return path


def geometry(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command_line, ["geometry", *map(str, arguments)])


@pytest.mark.parametrize(("config", "row"), ROWS)
def test_every_row_agrees_with_sglang(tmp_path: Path, config: dict[str, Any], row: dict[str, Any]) -> None:
    result = geometry("--model", write(tmp_path, config), "--tp-size", str(row["tp_size"]), "--json")
    if "error" in row:
        assert isinstance(result.exception, ConfigError)
        return
    assert result.exit_code == 0, result.output
    expected = {key: value for key, value in row.items() if key not in ("tp_size", "layer_ids")}
    assert json.loads(result.output) == {**expected, "slots": None}


def test_there_are_forty_rows() -> None:
    assert len(ROWS) == 40


@pytest.mark.parametrize(
    ("memory", "slots"),
    [("20GiB", 276), ("20GB", 257), ("77266944", 0), (str(2 * 77266944), 1), (str(2 * 77266944 - 1), 0), ("0", 0)],
)
def test_memory_says_how_many_slots_fit_with_the_reserved_row(model: Path, memory: str, slots: int) -> None:
    result = geometry("--model", model, "--memory", memory, "--json")
    assert json.loads(result.output)["slots"] == slots


def test_the_slots_that_fit_take_the_layouts_padding(tmp_path: Path) -> None:
    config = {**QWEN3_NEXT, "num_hidden_layers": 4, "linear_key_head_dim": 1, "linear_value_head_dim": 1}
    result = json.loads(geometry("--model", write(tmp_path, config), "--memory", "10KiB", "--json").output)
    conv = TensorSpec("conv", result["conv_dtype"], result["layers"], tuple(result["conv"][0]))
    temporal = TensorSpec("temporal", result["ssm_dtype"], result["layers"], tuple(result["ssm"]))
    state = Geometry((conv, temporal))
    assert state.place(result["slots"]).size_bytes <= 10 * 1024 < state.place(result["slots"] + 1).size_bytes


def test_people_see_every_tensor_and_the_sum(model: Path) -> None:
    done = mambapool("geometry", "--model", str(model.parent), "--memory", "20GiB", "--tp-size", "2")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["conv", "bfloat16", "36", "4096", "×", "3", "884,736"] in lines
    assert ["temporal", "float32", "36", "16", "×", "128", "×", "128", "37,748,736"] in lines
    assert "qwen3_next, one of 2 ranks: 38,633,472 bytes per slot" in done.stdout
    assert "554 slots fit into 20.0 GiB" in done.stdout


def test_the_environment_names_the_model(model: Path) -> None:
    done = mambapool("geometry", MAMBAPOOL_MODEL=str(model), MAMBAPOOL_TP_SIZE="2", MAMBAPOOL_JSON="true")
    assert json.loads(done.stdout)["bytes_per_slot"] == 38633472


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"model_type": ...}, "model_type"),
        ({"linear_num_value_heads": ...}, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": "4"}, "linear_conv_kernel_dim"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_a_config_that_describes_no_state_is_refused_with_the_key(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    config = {key: value for key, value in {**QWEN3_NEXT, **changes}.items() if value is not ...}
    result = geometry("--model", write(tmp_path, config))
    assert isinstance(result.exception, MambaPoolError)
    assert named in str(result.exception)


def test_a_refusal_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = mambapool("geometry", "--model", str(write(tmp_path, {"model_type": "llama"})))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "'llama'" in done.stderr
    assert "qwen3_next" in done.stderr, "says what is accepted"
