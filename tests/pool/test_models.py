"""The state per rank of every supported model type, from configs as checkpoints have them."""

from __future__ import annotations

import copy
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from mambapool.pool.errors import ConfigError, ModelConfigError
from mambapool.pool.layout import DTYPE_BYTES, Geometry, TensorSpec
from mambapool.pool.model_config import MAX_CONFIG_BYTES
from mambapool.pool.models import (
    SUPPORTED_MODEL_TYPES,
    StateShape,
    load_model_config,
    state_shape,
)

Config = dict[str, Any]

STATE_SHAPES: list[dict[str, Any]] = json.loads(
    Path(__file__).parents[1].joinpath("data", "state_shapes.json").read_text()
)

QWEN3_NEXT: Config = STATE_SHAPES[0]["config"]


SGLANG_ROWS = [
    pytest.param(model["config"], row, id=f"{model['name']}, tp {row['tp_size']}")
    for model in STATE_SHAPES
    for row in model["expected"]
]


@pytest.mark.parametrize(("config", "row"), SGLANG_ROWS)
def test_the_state_is_what_sglang_computes(config: Config, row: dict[str, Any]) -> None:
    if "error" in row:
        with pytest.raises(ModelConfigError):
            state_shape(config, row["tp_size"])
        return
    shape = state_shape(config, row["tp_size"])
    computed = {
        "tp_size": row["tp_size"],
        "layers": shape.layers,
        "layer_ids": list(shape.layer_ids),
        "conv": [list(conv) for conv in shape.conv],
        "ssm": list(shape.temporal),
        "conv_dtype": shape.conv_dtype,
        "ssm_dtype": shape.temporal_dtype,
        "bytes_per_slot": shape.geometry().bytes_per_slot,
    }
    assert computed == row
    assert shape.model_type == config["model_type"]


def test_the_rows_cover_every_supported_model_type_at_five_sizes() -> None:
    assert {model["config"]["model_type"] for model in STATE_SHAPES} == set(SUPPORTED_MODEL_TYPES)
    assert [len(model["expected"]) for model in STATE_SHAPES] == [5] * 8


def config_of(model_type: str, **changes: Any) -> Config:
    """The config of that type in state_shapes.json with other values; ``...`` takes a key away."""
    found = next(m["config"] for m in STATE_SHAPES if m["config"]["model_type"] == model_type)
    config = {**copy.deepcopy(found), **changes}
    return {key: value for key, value in config.items() if value is not ...}


def with_linear_attn(**changes: Any) -> Config:
    section = {**config_of("kimi_linear")["linear_attn_config"], **changes}
    return config_of("kimi_linear", linear_attn_config={k: v for k, v in section.items() if v is not ...})


# Checkpoints. What they keep is worked out here by hand from the sizes of their layers.

NEMOTRON_NANO_9B_V2: Config = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "num_hidden_layers": 56,
    "hidden_size": 4480,
    "expand": 2,
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "head_dim": 128,
    "num_attention_heads": 40,
    "intermediate_size": 15680,
    "time_step_limit": [0.0, math.inf],
    "torch_dtype": "bfloat16",
}

FALCON_H1_7B: Config = {
    "model_type": "falcon_h1",
    "attn_layer_indices": None,
    "num_hidden_layers": 44,
    "hidden_size": 3072,
    "head_dim": 128,
    "intermediate_size": 12288,
    "mamba_d_conv": 4,
    "mamba_d_head": 128,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "torch_dtype": "bfloat16",
}

GRANITE_4_H_SMALL: Config = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 40,
    "hidden_size": 4096,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "torch_dtype": "bfloat16",
}

KIMI_LINEAR_48B: Config = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 27,
    "hidden_size": 2304,
    "head_dim": 72,
    "num_attention_heads": 32,
    "v_head_dim": 128,
    "intermediate_size": 9216,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [n for n in range(1, 28) if n not in (4, 8, 12, 16, 20, 24, 27)],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "dtype": "bfloat16",
}

FALCON_MAMBA_7B: Config = {
    "model_type": "falcon_mamba",
    "num_hidden_layers": 64,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "expand": 16,
    "conv_kernel": 4,
    "state_size": 16,
    "torch_dtype": "bfloat16",
}

MAMBA2_780M: Config = {
    "model_type": "mamba2",
    "num_hidden_layers": 48,
    "hidden_size": 1536,
    "expand": 2,
    "num_heads": 48,
    "head_dim": 64,
    "n_groups": 1,
    "state_size": 128,
    "conv_kernel": 4,
    "time_step_limit": [0.0, math.inf],
    "torch_dtype": "float32",
}


@pytest.mark.parametrize(
    ("config", "tp_size", "layers", "conv", "temporal", "bytes_per_slot"),
    [
        # q and k of 16 heads of 128, v of 32: 2 * 2048 + 4096 channels.
        ({**QWEN3_NEXT, "intermediate_size": 5120}, 1, 36, (8192, 3), (32, 128, 128), 77_266_944),
        # x of 128 heads of 80, B and C of 8 groups of 128: 10240 + 2 * 1024 channels. 27 layers.
        (NEMOTRON_NANO_9B_V2, 1, 27, (12288, 3), (128, 80, 128), 27 * (12288 * 6 + 128 * 80 * 128 * 4)),
        (NEMOTRON_NANO_9B_V2, 8, 27, (1536, 3), (16, 80, 128), 27 * (1536 * 6 + 16 * 80 * 128 * 4)),
        # 24 heads of 128, one group of 256, which each rank has a copy of.
        (FALCON_H1_7B, 1, 44, (3584, 3), (24, 128, 256), 44 * (3584 * 6 + 24 * 128 * 256 * 4)),
        (FALCON_H1_7B, 2, 44, (2048, 3), (12, 128, 256), 44 * (2048 * 6 + 12 * 128 * 256 * 4)),
        (FALCON_H1_7B, 3, 44, (1536, 3), (8, 128, 256), 44 * (1536 * 6 + 8 * 128 * 256 * 4)),
        (GRANITE_4_H_SMALL, 1, 36, (8448, 3), (128, 64, 128), 36 * (8448 * 6 + 128 * 64 * 128 * 4)),
        # q, k and v of 32 heads of 128: 3 * 4096 channels, the window first.
        (KIMI_LINEAR_48B, 1, 20, (3, 12288), (32, 128, 128), 43_417_600),
        (FALCON_MAMBA_7B, 1, 64, (8192, 3), (8192, 1, 16), 64 * (8192 * 6 + 8192 * 16 * 4)),
        (FALCON_MAMBA_7B, 4, 64, (2048, 3), (2048, 1, 16), 64 * (2048 * 6 + 2048 * 16 * 4)),
        (MAMBA2_780M, 1, 48, (3328, 3), (48, 64, 128), 48 * (3328 * 6 + 48 * 64 * 128 * 4)),
    ],
)
def test_checkpoints_keep_what_their_layers_need(
    config: Config,
    tp_size: int,
    layers: int,
    conv: tuple[int, ...],
    temporal: tuple[int, ...],
    bytes_per_slot: int,
) -> None:
    shape = state_shape(config, tp_size)
    assert (shape.layers, shape.conv, shape.temporal) == (layers, (conv,), temporal)
    assert shape.geometry().bytes_per_slot == bytes_per_slot


# Layers


def test_a_pattern_gives_a_state_to_its_ms_and_to_nothing_else() -> None:
    pattern = NEMOTRON_NANO_9B_V2["hybrid_override_pattern"]
    assert state_shape(NEMOTRON_NANO_9B_V2).layer_ids[:8] == (0, 2, 4, 6, 7, 9, 11, 13)
    assert {pattern[layer] for layer in state_shape(NEMOTRON_NANO_9B_V2).layer_ids} == {"M"}
    changed = {**NEMOTRON_NANO_9B_V2, "hybrid_override_pattern": "*EM-ME", "num_hidden_layers": 6}
    assert state_shape(changed).layer_ids == (2, 4)


def test_layers_block_type_comes_before_the_pattern() -> None:
    config = {**NEMOTRON_NANO_9B_V2, "layers_block_type": ["moe", "mamba", "mlp", "attention"]}
    assert state_shape(config).layer_ids == (1,)
    assert state_shape({**config, "layers_block_type": None}) == state_shape(NEMOTRON_NANO_9B_V2)


def test_nemotron_h_has_as_many_layers_as_it_lists_whatever_num_hidden_layers_says() -> None:
    assert state_shape({**NEMOTRON_NANO_9B_V2, "num_hidden_layers": 3}).layers == 27


def test_the_new_names_of_layer_kinds_mean_the_same() -> None:
    old = state_shape(GRANITE_4_H_SMALL)
    renamed = {"mamba": "linear_attention", "attention": "full_attention"}
    kinds = [renamed[kind] for kind in GRANITE_4_H_SMALL["layer_types"]]
    assert state_shape({**GRANITE_4_H_SMALL, "layer_types": kinds}) == old
    nemotron = {**NEMOTRON_NANO_9B_V2, "layers_block_type": ["linear_attention", "mlp", "full_attention"]}
    assert state_shape(nemotron).layer_ids == (0,)


def test_qwen3_next_layers_follow_the_interval_and_the_list_only_without_one() -> None:
    kinds = ["full_attention"] * 47 + ["linear_attention"]
    assert state_shape({**QWEN3_NEXT, "layer_types": kinds}) == state_shape(QWEN3_NEXT)
    listed = config_of("qwen3_next", layer_types=kinds, full_attention_interval=...)
    assert state_shape(listed).layer_ids == (47,)


@pytest.mark.parametrize(("interval", "layer_ids"), [(2, (0, 2)), (3, (0, 1, 3)), (5, (0, 1, 2, 3))])
def test_every_interval_th_layer_is_attention(interval: int, layer_ids: tuple[int, ...]) -> None:
    config = config_of("qwen3_next", num_hidden_layers=4, full_attention_interval=interval)
    assert state_shape(config).layer_ids == layer_ids


def test_kda_layers_count_from_1_and_come_back_counted_from_0_in_order() -> None:
    assert state_shape(with_linear_attn(kda_layers=[27, 1, 3])).layer_ids == (0, 2, 26)


# Which key decides


@pytest.mark.parametrize(
    ("model_type", "decoys"),
    [
        ("qwen3_next", ("head_dim", "intermediate_size", "hidden_size", "num_attention_heads")),
        ("nemotron_h", ("head_dim", "intermediate_size", "hidden_size", "expand", "mamba_n_groups")),
        ("falcon_h1", ("head_dim", "intermediate_size", "hidden_size", "mamba_expand")),
        ("granitemoehybrid", ("head_dim", "intermediate_size", "shared_intermediate_size")),
        ("kimi_linear", ("head_dim", "intermediate_size", "hidden_size", "num_attention_heads")),
        ("mamba2", ("hidden_size", "expand")),
        ("mamba", ("hidden_size", "expand", "head_dim")),
        ("falcon_mamba", ("hidden_size", "expand", "head_dim")),
    ],
)
@pytest.mark.parametrize("value", [1, 7919, 0, "auto", None, ...])
def test_keys_of_attention_and_mlp_do_not_matter(model_type: str, decoys: tuple[str, ...], value: object) -> None:
    expected = state_shape(config_of(model_type), 2)
    for decoy in decoys:
        assert state_shape(config_of(model_type, **{decoy: value}), 2) == expected


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
@pytest.mark.parametrize("model_type", ["qwen3_next", "nemotron_h", "falcon_h1"])
def test_mamba_ssm_dtype_is_the_dtype_of_temporal_states(model_type: str, dtype: str) -> None:
    shape = state_shape(config_of(model_type, mamba_ssm_dtype=dtype))
    assert (shape.conv_dtype, shape.temporal_dtype) == ("bfloat16", dtype)
    temporal = shape.geometry().tensors[1]
    assert temporal.bytes_per_slot == shape.layers * math.prod(shape.temporal) * DTYPE_BYTES[dtype]


@pytest.mark.parametrize("model_type", ["qwen3_next", "nemotron_h", "falcon_h1"])
def test_a_null_mamba_ssm_dtype_is_none_given(model_type: str) -> None:
    assert state_shape(config_of(model_type, mamba_ssm_dtype=None)).temporal_dtype == "float32"


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "mamba2", "mamba", "falcon_mamba", "kimi_linear"])
def test_mamba_ssm_dtype_does_nothing_where_sglang_does_not_read_it(model_type: str) -> None:
    assert state_shape(config_of(model_type, mamba_ssm_dtype="float16")).temporal_dtype == "float32"


@pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)
@pytest.mark.parametrize("key", ["torch_dtype", "dtype", "mamba_ssm_cache_dtype"])
def test_the_dtype_of_the_weights_does_not_matter(model_type: str, key: str) -> None:
    assert state_shape(config_of(model_type, **{key: "float16"})) == state_shape(config_of(model_type))


def test_a_null_mamba_d_ssm_is_expand_times_hidden_size() -> None:
    config = {**FALCON_H1_7B, "mamba_d_ssm": None, "mamba_n_heads": 48}
    assert state_shape(config).conv == ((2 * 3072 + 2 * 256, 3),)


@pytest.mark.parametrize("given", ["auto", ...])
def test_the_heads_of_falcon_h1_divide_its_inner_size_unless_told_otherwise(given: object) -> None:
    config = config_of("falcon_h1", mamba_d_head=given)
    assert state_shape(config) == state_shape(config_of("falcon_h1"))


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba"])
def test_mamba_1_expands_the_hidden_size_only_without_an_intermediate_size(model_type: str) -> None:
    config = config_of(model_type, expand=3, intermediate_size=...)
    assert state_shape(config).temporal == (3 * 768, 1, 16)
    assert state_shape({**config, "intermediate_size": 64}).temporal == (64, 1, 16)


# Wrappers


@pytest.mark.parametrize("key", ["text_config", "llm_config"])
@pytest.mark.parametrize("tp_size", [1, 4])
def test_a_wrapper_has_the_state_of_the_model_in_it(key: str, tp_size: int) -> None:
    wrapper = {
        "model_type": "some_vision_model",
        "num_hidden_layers": 2,
        "mamba_ssm_dtype": "float16",
        "vision_config": {"model_type": "vit"},
        key: QWEN3_NEXT,
    }
    assert state_shape(wrapper, tp_size) == state_shape(QWEN3_NEXT, tp_size)


def test_a_nested_model_comes_before_the_keys_around_it() -> None:
    outer = config_of("kimi_linear", num_hidden_layers=2, mamba_ssm_dtype="float16")
    assert state_shape({**outer, "text_config": QWEN3_NEXT}) == state_shape(QWEN3_NEXT)


def test_a_nested_object_without_a_model_type_completes_the_outer_one() -> None:
    bare = {key: value for key, value in QWEN3_NEXT.items() if key != "model_type"}
    assert state_shape({"model_type": "qwen3_next", "text_config": bare}) == state_shape(QWEN3_NEXT)
    config = {**QWEN3_NEXT, "mamba_ssm_dtype": "float32", "text_config": {"mamba_ssm_dtype": "float16"}}
    assert state_shape(config).temporal_dtype == "float16"


@pytest.mark.parametrize("nested", [None, {}, {"model_type": "llama", "num_hidden_layers": 1}])
def test_a_nested_object_that_says_nothing_of_a_state_changes_nothing(nested: object) -> None:
    assert state_shape({**QWEN3_NEXT, "text_config": nested}) == state_shape(QWEN3_NEXT)


def test_an_error_in_a_nested_model_names_the_path_to_the_key() -> None:
    wrapper = {"model_type": "kimi_k3", "text_config": with_linear_attn(num_heads=...)}
    with pytest.raises(ModelConfigError, match=re.escape("text_config.linear_attn_config.num_heads is missing")):
        state_shape(wrapper)


@pytest.mark.parametrize("nested", [3, "qwen3_next", [QWEN3_NEXT], True])
def test_a_nested_model_that_is_no_object_is_refused(nested: object) -> None:
    with pytest.raises(ModelConfigError, match=r"text_config is .*: expected an object"):
        state_shape({**QWEN3_NEXT, "text_config": nested})


# Refusals

#: The sizes without which the state cannot be told, by model type.
SIZES = [
    (model_type, key)
    for model_type, keys in {
        "qwen3_next": "num_hidden_layers full_attention_interval linear_num_key_heads linear_num_value_heads "
        "linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim",
        "nemotron_h": "mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel",
        "falcon_h1": "num_hidden_layers mamba_d_ssm mamba_n_groups mamba_n_heads mamba_d_state mamba_d_conv",
        "granitemoehybrid": "num_hidden_layers hidden_size mamba_expand mamba_n_groups mamba_n_heads "
        "mamba_d_head mamba_d_state mamba_d_conv",
        "mamba2": "num_hidden_layers n_groups conv_kernel num_heads head_dim state_size",
        "mamba": "num_hidden_layers conv_kernel state_size",
        "falcon_mamba": "num_hidden_layers conv_kernel state_size",
        "kimi_linear": "num_hidden_layers",
    }.items()
    for key in keys.split()
]

REQUIRED = [
    *SIZES,
    ("nemotron_h", "layers_block_type"),
    ("granitemoehybrid", "layer_types"),
    ("kimi_linear", "linear_attn_config"),
]

NOT_SIZES = [
    True,
    4.0,
    math.nan,
    math.inf,
    "4",
    -1,
    0,
    2**24 + 1,
    10**5000,  # more digits than CPython prints
    [4],
    {"value": 4},
    "long" * 10_000,
]


def assert_refused(config: Config, says: str, tp_size: int = 1) -> None:
    with pytest.raises(ModelConfigError, match=re.escape(says)) as caught:
        state_shape(config, tp_size)
    assert config["model_type"] in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("model_type", "key"), REQUIRED)
def test_a_missing_key_is_named_with_the_model_type(model_type: str, key: str) -> None:
    assert_refused(config_of(model_type, **{key: ...}), f"{model_type} config: {key} is missing")


@pytest.mark.parametrize(("model_type", "key"), [pair for pair in REQUIRED if pair[1] != "mamba_d_ssm"])
def test_a_null_where_a_value_is_needed_is_named(model_type: str, key: str) -> None:
    assert_refused(config_of(model_type, **{key: None}), f"{model_type} config: {key} is null")


@pytest.mark.parametrize(("model_type", "key"), SIZES)
def test_a_size_must_be_a_whole_number_in_range(model_type: str, key: str) -> None:
    for value in NOT_SIZES:
        assert_refused(config_of(model_type, **{key: value}), f"{model_type} config: {key} is ")
        assert_refused(config_of(model_type, **{key: value}), ": expected a whole number from ")


@pytest.mark.parametrize("key", ["num_heads", "head_dim", "short_conv_kernel_size"])
def test_the_sizes_of_kda_are_checked_like_all_others(key: str) -> None:
    assert_refused(with_linear_attn(**{key: ...}), f"linear_attn_config.{key} is missing")
    for value in NOT_SIZES:
        assert_refused(with_linear_attn(**{key: value}), f"linear_attn_config.{key} is ")


def test_mamba_1_without_any_inner_size_is_refused_by_key() -> None:
    config = config_of("mamba", intermediate_size=..., expand=...)
    assert_refused(config, "mamba config: intermediate_size is missing")
    assert_refused({**config, "expand": 2.0}, "mamba config: expand is 2.0")
    assert_refused({**config, "expand": 2, "hidden_size": None}, "mamba config: hidden_size is null")


@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("qwen3_next", "linear_conv_kernel_dim"),
        ("nemotron_h", "conv_kernel"),
        ("falcon_h1", "mamba_d_conv"),
        ("mamba", "conv_kernel"),
    ],
)
def test_a_convolution_of_width_1_keeps_nothing_and_is_refused(model_type: str, key: str) -> None:
    assert_refused(config_of(model_type, **{key: 1}), f"{key} is 1: expected a whole number from 2")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (config_of("nemotron_h", layers_block_type={}), "layers_block_type is {}: expected the kind"),
        (config_of("nemotron_h", layers_block_type=["mamba", "M"]), "layers_block_type[1] is 'M'"),
        (
            config_of("nemotron_h", layers_block_type=["mamba", ["mamba"]]),
            "layers_block_type[1] is ['mamba']",
        ),
        (config_of("nemotron_h", layers_block_type=["mlp"]), "layers_block_type leaves no layer"),
        (config_of("nemotron_h", layers_block_type=[]), "layers_block_type leaves no layer"),
        (config_of("nemotron_h", layers_block_type=["mamba"] * 5000), "names 5000 layers: expected at most"),
        ({**NEMOTRON_NANO_9B_V2, "hybrid_override_pattern": "M-X"}, "hybrid_override_pattern[2] is 'X'"),
        ({**NEMOTRON_NANO_9B_V2, "hybrid_override_pattern": "m-"}, "expected one of M, *, -, E"),
        ({**NEMOTRON_NANO_9B_V2, "hybrid_override_pattern": ""}, "hybrid_override_pattern leaves no layer"),
        ({**NEMOTRON_NANO_9B_V2, "hybrid_override_pattern": 56}, "hybrid_override_pattern is 56"),
        (config_of("granitemoehybrid", layer_types=["mamba"] * 39), "names 39 layers, but num_hidden_layers"),
        (config_of("granitemoehybrid", layer_types=["moe"] * 40), "layer_types[0] is 'moe'"),
        (config_of("granitemoehybrid", layer_types=["attention"] * 40), "layer_types leaves no layer"),
        (config_of("qwen3_next", full_attention_interval=1), "full_attention_interval leaves no layer"),
        (config_of("qwen3_next", num_hidden_layers=5000), "expected a whole number from 1 to 4096"),
        (with_linear_attn(kda_layers=...), "linear_attn_config.kda_layers is missing"),
        (with_linear_attn(kda_layers="123"), "linear_attn_config.kda_layers is '123': expected a list"),
        (with_linear_attn(kda_layers=[]), "linear_attn_config.kda_layers leaves no layer"),
        (
            with_linear_attn(kda_layers=[1, 0]),
            "kda_layers[1] is 0: expected each number once, counted from 1",
        ),
        (with_linear_attn(kda_layers=[28]), "kda_layers[0] is 28"),
        (with_linear_attn(kda_layers=[1, 2, 1]), "kda_layers[2] is 1"),
        (with_linear_attn(kda_layers=[True]), "kda_layers[0] is True"),
        (with_linear_attn(kda_layers=[[1]]), "kda_layers[0] is [1]"),
        (config_of("kimi_linear", linear_attn_config=[]), "linear_attn_config is []: expected an object"),
    ],
)
def test_layers_that_cannot_be_told_are_refused_by_key(config: Config, says: str) -> None:
    assert_refused(config, says)


@pytest.mark.parametrize("value", ["float64", "torch.float32", "", "FLOAT32", 32, True, ["float32"], {}])
def test_an_unknown_mamba_ssm_dtype_is_refused_not_replaced(value: object) -> None:
    assert_refused({**QWEN3_NEXT, "mamba_ssm_dtype": value}, "expected one of float32, float16, bfloat16")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (config_of("falcon_h1", mamba_d_ssm=1000), "mamba_n_heads is 128: with heads of 8"),
        (config_of("falcon_h1", mamba_d_head="auto", mamba_d_ssm=1000), "mamba_n_heads is 128"),
        (config_of("falcon_h1", mamba_d_head="half"), "mamba_d_head is 'half'"),
        (config_of("falcon_h1", mamba_d_head=None), "mamba_d_head is null"),
        (config_of("granitemoehybrid", mamba_d_head=32), "is not the inner size, 8192"),
        (config_of("granitemoehybrid", mamba_d_head="auto"), "mamba_d_head is 'auto'"),
        (config_of("mamba2", intermediate_size=4096), "is not the inner size, 4096"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(config: Config, says: str) -> None:
    assert_refused(config, says)


@pytest.mark.parametrize(
    ("config", "tp_size", "key", "accepted"),
    [
        (QWEN3_NEXT, 3, "linear_num_value_heads", "1, 2, 4, 8, 16, 32"),
        (NEMOTRON_NANO_9B_V2, 256, "mamba_num_heads", "1, 2, 4, 8, 16, 32, 64, 128"),
        (FALCON_H1_7B, 5, "mamba_n_heads", "1, 2, 3, 4, 6, 8, 12, 24"),
        (KIMI_LINEAR_48B, 64, "linear_attn_config.num_heads", "1, 2, 4, 8, 16, 32"),
        (config_of("mamba2"), 7, "num_heads", "1, 2, 4, 8, 16, 32, 64, 128"),
        (
            config_of("mamba", intermediate_size=96),
            5,
            "intermediate_size",
            "1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96",
        ),
        (config_of("mamba", intermediate_size=..., hidden_size=3), 4, "expand * hidden_size", "1, 2, 3, 6"),
    ],
)
def test_heads_that_do_not_divide_say_which_tp_sizes_do(
    config: Config, tp_size: int, key: str, accepted: str
) -> None:
    assert_refused(config, f"config: {key} ", tp_size)
    with pytest.raises(
        ModelConfigError, match=rf"cannot be divided among tp_size {tp_size}: accepted are {accepted}$"
    ):
        state_shape(config, tp_size)
    for size in map(int, accepted.split(", ")):
        assert state_shape(config, size).layers > 0


def test_groups_are_divided_or_copied_but_never_cut() -> None:
    config = config_of("mamba2", num_heads=96, head_dim=1, n_groups=8, state_size=10, intermediate_size=...)
    channels = {tp_size: state_shape(config, tp_size).conv[0][0] for tp_size in (1, 2, 4, 8, 12, 16, 96)}
    # heads per rank, and twice the groups per rank times 10
    assert channels == {1: 96 + 160, 2: 48 + 80, 4: 24 + 40, 8: 12 + 20, 12: 8 + 20, 16: 6 + 20, 96: 1 + 20}
    for tp_size in (3, 6):
        assert_refused(config, f"(n_groups 8) cannot be divided among tp_size {tp_size}", tp_size)


def test_tp_size_must_be_a_whole_number_in_range() -> None:
    wrong: list[Any] = [0, -1, True, 1.0, "1", None, 1025, 10**5000, [1]]
    for tp_size in wrong:
        with pytest.raises(ModelConfigError, match=r"tp_size .*: expected a whole number from 1 to 1024"):
            state_shape(QWEN3_NEXT, tp_size)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next ", "Qwen3_next", "", None, 3, ["mamba"], "\ud800"])
def test_an_unknown_model_type_lists_the_supported_ones(model_type: object) -> None:
    with pytest.raises(ModelConfigError, match="model_type is ") as caught:
        state_shape({**QWEN3_NEXT, "model_type": model_type})
    assert str(caught.value).endswith(", ".join(SUPPORTED_MODEL_TYPES))
    str(caught.value).encode()


def test_a_config_without_model_type_lists_the_supported_ones() -> None:
    with pytest.raises(ModelConfigError, match="model_type is missing: supported are qwen3_next, "):
        state_shape({})


@pytest.mark.parametrize("config", [None, [], "qwen3_next", 3])
def test_a_config_that_is_no_object_is_refused(config: Any) -> None:
    with pytest.raises(ModelConfigError, match="expected an object"):
        state_shape(config)


def test_the_config_is_left_as_it_was() -> None:
    config = {**copy.deepcopy(QWEN3_NEXT), "text_config": {"mamba_ssm_dtype": "float16"}}
    before = copy.deepcopy(config)
    state_shape(config, 2)
    assert config == before


# Geometry


def test_the_geometry_has_conv_then_temporal() -> None:
    assert state_shape(QWEN3_NEXT).geometry() == Geometry(
        (
            TensorSpec("conv", "bfloat16", 36, (8192, 3)),
            TensorSpec("temporal", "float32", 36, (32, 128, 128)),
        )
    )


def test_several_conv_states_are_numbered() -> None:
    shape = StateShape("x", (0, 5), ((4, 3), (8, 3)), (2, 2), "float16", "float32")
    assert shape.layers == 2
    assert shape.geometry() == Geometry(
        (
            TensorSpec("conv.0", "float16", 2, (4, 3)),
            TensorSpec("conv.1", "float16", 2, (8, 3)),
            TensorSpec("temporal", "float32", 2, (2, 2)),
        )
    )


def test_20_gib_hold_276_states_of_qwen3_next() -> None:
    assert state_shape(QWEN3_NEXT).geometry().slots_that_fit(20 * 2**30) == 276


# Files


def test_a_config_is_read_from_a_file_or_from_its_directory(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(NEMOTRON_NANO_9B_V2))  # with an Infinity, as the checkpoint has it
    assert "Infinity" in file.read_text()
    for path in (file, tmp_path, str(file), str(tmp_path)):
        assert load_model_config(path) == NEMOTRON_NANO_9B_V2
    other = file.rename(tmp_path / "nano.json")
    assert state_shape(load_model_config(other)) == state_shape(NEMOTRON_NANO_9B_V2)


def test_a_nan_is_refused_only_where_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**QWEN3_NEXT, "rope_theta": math.nan}))
    assert state_shape(load_model_config(file)) == state_shape(QWEN3_NEXT)
    file.write_text(json.dumps({**QWEN3_NEXT, "linear_num_key_heads": math.nan}))
    with pytest.raises(ModelConfigError, match="linear_num_key_heads is nan"):
        state_shape(load_model_config(file))


BROKEN_FILES = [
    (b"", "is not JSON: Expecting value"),
    (b'{"model_type": "mamba",', "is not JSON"),
    (b"{'model_type': 'mamba'}", "is not JSON"),
    (b'{"a": 1} {"b": 2}', "is not JSON: Extra data"),
    (b'\xef\xbb\xbf{"a": 1}', "is not JSON: Unexpected UTF-8 BOM"),
    (b'{"a": ' + b"1" * 5000 + b"}", "is not JSON"),
    (b"[" * 200_000, "is nested too deeply"),
    (b'{"a": "\xff"}', "is not UTF-8 at byte 7"),
    ('{"a": 1}'.encode("utf-16"), "is not UTF-8 at byte 0"),
    (b"[]", "holds []: expected a JSON object"),
    (b"null", "holds None: expected a JSON object"),
    (b'"config"', "holds 'config': expected a JSON object"),
]


@pytest.mark.parametrize(("content", "says"), BROKEN_FILES, ids=[says for _, says in BROKEN_FILES])
def test_a_file_that_is_no_json_object_is_refused_by_name(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ModelConfigError, match=re.escape(f"{file} {says}")):
        load_model_config(file)


def test_a_file_is_refused_one_byte_above_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    start, end = b'{"a": "', b'"}'
    file.write_bytes(start + b"x" * (MAX_CONFIG_BYTES - len(start) - len(end)) + end)
    assert set(load_model_config(file)) == {"a"}
    with file.open("ab") as stream:
        stream.write(b"\n")
    with pytest.raises(ModelConfigError, match=f"{file} has more than {MAX_CONFIG_BYTES} bytes"):
        load_model_config(file)


def test_an_endless_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"/dev/zero cannot be read \(it is a device, not a regular file"):
        load_model_config("/dev/zero")
    endless = tmp_path / "config.json"
    endless.touch()
    os.truncate(endless, 2**40)  # a hole, which takes no room
    with pytest.raises(ModelConfigError, match=r"config\.json has more than"):
        load_model_config(endless)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nested" / "config.json").mkdir(parents=True)
    unreadable: list[tuple[str | Path, str]] = [
        (tmp_path, "No such file or directory"),
        (tmp_path / "missing.json", "No such file or directory"),
        (tmp_path / "loop", "Too many levels of symbolic links"),
        (tmp_path / "nested", "Is a directory"),
        (tmp_path / ("n" * 300), "File name too long"),
        (Path("/dev/null/config.json"), "Not a directory"),
        ("a\0b", "embedded null byte"),
    ]
    for path, reason in unreadable:
        with pytest.raises(ModelConfigError, match=re.escape(reason)) as caught:
            load_model_config(path)
        assert str(path) in str(caught.value)
        assert "name a config.json or a directory that holds one" in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_named_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    file.chmod(0)
    with pytest.raises(ModelConfigError, match="Permission denied"):
        load_model_config(file)


def test_the_error_is_the_operators() -> None:
    assert issubclass(ModelConfigError, ConfigError)
