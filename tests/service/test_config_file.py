from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mambapool.pool.errors import ConfigError
from mambapool.pool.layout import Geometry, TensorSpec
from mambapool.service.config import PoolConfig
from mambapool.service.config_file import FileSettings, read_config_file

MODEL = {
    "model_type": "mamba2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "expand": 2,
    "head_dim": 16,
    "num_heads": 8,
    "n_groups": 1,
    "state_size": 16,
    "conv_kernel": 4,
}

Read = Callable[..., FileSettings]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Write a file, and read it as ``--config`` does with the flags that are given."""

    def write_and_read(text: str | bytes, **flags: Any) -> FileSettings:
        path = tmp_path / "pools.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_config_file(str(path), {key.replace("_", "-"): value for key, value in flags.items()})

    return write_and_read


def geometry(*states: str) -> Geometry:
    return Geometry(tuple(TensorSpec.parse(state) for state in states))


CONV = "conv=bfloat16:4x96x3"
ONE_POOL = f'[[pool]]\nslots = 64\nstate = ["{CONV}"]\n'
TWO_POOLS = '[[pool]]\npool = "a"\nslots = 8\n[[pool]]\npool = "b"\nslots = 9\n'


def test_a_file_describes_several_pools_with_the_names_of_the_flags(read: Read) -> None:
    settings = read(
        f'dir = "/run/engines"\nmax-sessions = 16\nmax-waiters = 0\n'
        f'[[pool]]\npool = "engine-a"\nslots = 512\nstate = ["{CONV}", "t=float32:1x2"]\ntp-size = 2\n'
        'device = "cpu"\n'
        "[[pool]]\nslots = 3\n"
    )
    states = geometry(CONV, "t=float32:1x2")
    pools = (PoolConfig("engine-a", 512, states, 2), PoolConfig("default", 3))
    assert settings == FileSettings("/run/engines", 16, 0, pools)


def test_an_empty_file_says_nothing(read: Read) -> None:
    assert read("") == FileSettings(None, None, None, ())


def test_the_path_of_a_model_is_relative_to_the_file(read: Read, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    by_folder = read('[[pool]]\nslots = 4\nmodel = "model"\n').pools
    by_file = read(f'[[pool]]\nslots = 4\nmodel = "{tmp_path}/model/config.json"\n').pools
    assert by_folder == by_file
    assert by_folder[0].geometry is not None
    assert [tensor.name for tensor in by_folder[0].geometry.tensors] == ["conv", "temporal"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[pool\n", "Expected .*at line 1"),
        (b"\xff", "utf-8"),
        ("x=" + "[" * 5_000, "recursion"),
        ("[pool]\nslots = 3", "two brackets"),
        ("slots = 3", "unknown key 'slots'; known here are dir, max-sessions, max-waiters, quarantine, pool"),
        ("pool = [1]", r"\[\[pool\]\] 1: expected a table"),
        ("[[pool]]", r"\[\[pool\]\] 1: slots is missing"),
        ("[[pool]]\nslots = true", "slots must be a whole number, not True"),
        ("[[pool]]\nslots = 1.5", "slots must be a whole number, not 1.5"),
        ("[[pool]]\nslots = 0", "slots 0: expected a whole number"),
        ('[[pool]]\nslots = 3\nstate = "c=float32:1x2"', "state must be a list"),
        ("[[pool]]\nslots = 3\nstate = [1]", "state must be a list of texts"),
        ('[[pool]]\nslots = 3\nstate = ["c"]', "--state 'c': expected NAME=DTYPE"),
        ('[[pool]]\nslots = 3\nstate = ["c=float32:1x2", "c=float32:1x2"]', "tensor c is named twice"),
        (f'[[pool]]\nslots = 3\nmodel = "x"\nstate = ["{CONV}"]', "--model and --state"),
        ('[[pool]]\nslots = 3\nmodel = "missing.json"', "missing.json cannot be read"),
        ("[[pool]]\nslots = 3\ntp-size = 2", "--tp-size needs --model or --state"),
        ("[[pool]]\nslots = 3\ntp_size = 2", "unknown key 'tp_size'"),
        ('[[pool]]\nslots = 3\npool = "A"', "pool name 'A'"),
        ('[[pool]]\nslots = 3\ndevice = "cuda"', "--device cuda needs --model or --state"),
        ('[[pool]]\nslots = 3\ndevice = "tpu"', "device 'tpu'"),
        ("dir = ''", "dir is empty"),
        ("[[pool]]\nslots = 3\nmodel = ''", "model is empty"),
        ("max-sessions = 'many'", "max-sessions must be a whole number, not 'many'"),
        ("max-waiters = 1.5", "max-waiters must be a whole number, not 1.5"),
        (ONE_POOL + "[[pool]]\nslots = 0", r"\[\[pool\]\] 2: slots 0"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_place(read: Read, text: str | bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read(text)
    assert "pools.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"), [("missing.toml", "No such file"), ("", "Is a directory"), ("a\0b", "null")]
)
def test_a_file_that_cannot_be_read_is_refused_with_its_name(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_config_file(f"{tmp_path}/{name}", {})
    assert f"--config {tmp_path}/{name}" in str(caught.value)


def test_flags_change_the_only_pool_of_a_file_and_keep_what_they_do_not_name(read: Read) -> None:
    assert read(ONE_POOL, slots=32).pools == (PoolConfig("default", 32, geometry(CONV)),)
    assert read(ONE_POOL, tp_size=2, device="cpu").pools == (PoolConfig("default", 64, geometry(CONV), 2),)
    assert read('[[pool]]\npool = "a"\nslots = 8\n', slots=5).pools == (PoolConfig("a", 5),)


def test_a_state_from_flags_replaces_the_files_model_and_its_state(read: Read) -> None:
    state = ("t=float32:1x2",)
    changed = (PoolConfig("default", 64, geometry(*state)),)
    assert read(ONE_POOL, state=state).pools == changed
    assert read('[[pool]]\nslots = 64\nmodel = "missing.json"\n', state=state).pools == changed


def test_flags_change_the_pool_that_they_name(read: Read) -> None:
    assert read(TWO_POOLS, pool="b", slots=5).pools == (PoolConfig("a", 8), PoolConfig("b", 5))


def test_flags_with_slots_add_a_pool_that_the_file_has_not(read: Read) -> None:
    assert read(TWO_POOLS, slots=5).pools == (PoolConfig("a", 8), PoolConfig("b", 9), PoolConfig("default", 5))
    assert read(ONE_POOL, pool="more", slots=5).pools[1] == PoolConfig("more", 5)


def test_flags_of_a_state_without_a_pool_to_put_it_in_are_refused(read: Read) -> None:
    with pytest.raises(ConfigError, match=r"no pool .default.*--pool.*--slots"):
        read(TWO_POOLS, state=("t=float32:1x2",))


@pytest.mark.parametrize("flags", [{"pool": "b"}, {"tp_size": 2}, {"device": "cpu"}])
def test_flags_that_describe_no_pool_by_themselves_leave_several_as_they_are(
    read: Read, flags: dict[str, Any]
) -> None:
    assert read(TWO_POOLS, **flags).pools == (PoolConfig("a", 8), PoolConfig("b", 9))
