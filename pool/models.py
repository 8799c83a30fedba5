"""The state that one tensor-parallel rank keeps per request, from a model's ``config.json``.

The shapes are those that SGLang 0.5.23's configuration classes compute (``sglang/srt/configs``:
``mamba_utils.py`` and one file per model type), because its kernels run on the pool. Two rules follow:

- Where a checkpoint says one thing under two keys, the key that SGLang reads decides. (Flags that change
  its states, such as ``--mamba-ssm-dtype``, are not in a config: name the tensors instead.)
- Library defaults that are rules (``"mamba_d_head": "auto"``) are followed. Library defaults that are
  numbers describe one particular model: a missing size is an error, never a guess.

Everything that is refused raises :class:`ModelConfigError`, which names the key and what is accepted.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mambapool.pool.errors import ModelConfigError
from mambapool.pool.layout import DTYPE_BYTES, Geometry, TensorSpec

#: Public configs have a few KiB; only a file named by mistake is larger.
MAX_CONFIG_BYTES = 16 * 2**20

# Far above any model. They keep a wrong file from costing minutes or gigabytes before it is refused.
MAX_SIZE = 2**24
MAX_LAYERS = 4096
MAX_TP_SIZE = 1024

#: SGLang keeps conv states in bfloat16 whatever ``torch_dtype`` says; only its environment changes that.
CONV_DTYPE = "bfloat16"

#: SGLang's choice for temporal states: of most model types always, of the others without mamba_ssm_dtype.
TEMPORAL_DTYPE = "float32"

#: Where wrappers keep their language model. (SGLang knows more names, for models without a state.)
_NESTED_IN = ("llm_config", "text_config")


@dataclass(frozen=True, slots=True)
class StateShape:
    """What one rank keeps per request: the same tensors for every layer in ``layer_ids``.

    ``conv`` (usually one) and ``temporal`` are shapes without the layer and slot dimensions.
    ``layer_ids`` count from 0 over all layers of the model, ascending.
    """

    model_type: str
    layer_ids: tuple[int, ...]
    conv: tuple[tuple[int, ...], ...]
    temporal: tuple[int, ...]
    conv_dtype: str
    temporal_dtype: str

    @property
    def layers(self) -> int:
        return len(self.layer_ids)

    def geometry(self) -> Geometry:
        """The tensors ``conv`` (``conv.0``, ``conv.1`` … if several) and ``temporal``, in that order."""
        names = ["conv"] if len(self.conv) == 1 else [f"conv.{i}" for i in range(len(self.conv))]
        conv = [
            TensorSpec(name, self.conv_dtype, self.layers, shape)
            for name, shape in zip(names, self.conv, strict=True)
        ]
        return Geometry((*conv, TensorSpec("temporal", self.temporal_dtype, self.layers, self.temporal)))


def load_model_config(path: str | os.PathLike[str]) -> dict[str, object]:
    """Read ``path``: a ``config.json``, or a directory that holds one."""
    file = Path(path)
    try:
        if file.is_dir():
            file /= "config.json"
        with file.open("rb") as stream:
            content = stream.read(MAX_CONFIG_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelConfigError(
            f"{file} cannot be read ({reason}): name a config.json or a directory that holds one"
        ) from error
    if len(content) > MAX_CONFIG_BYTES:
        raise ModelConfigError(f"{file} has more than {MAX_CONFIG_BYTES} bytes: that is no config.json")
    try:
        # NaN and Infinity are let through: nemotron_h writes "time_step_limit": [0.0, Infinity].
        config = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ModelConfigError(f"{file} is not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise ModelConfigError(f"{file} is nested too deeply") from error
    except ValueError as error:
        raise ModelConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelConfigError(f"{file} holds {_shown(config)}: expected a JSON object")
    return config


def state_shape(config: Mapping[str, object], tp_size: int = 1) -> StateShape:
    """The state of one of ``tp_size`` equal ranks of the model that ``config`` describes."""
    if not isinstance(config, Mapping):
        raise ModelConfigError(f"model config is {_shown(config)}: expected an object")
    if type(tp_size) is not int or not 1 <= tp_size <= MAX_TP_SIZE:
        raise ModelConfigError(f"tp_size {_shown(tp_size)}: expected a whole number from 1 to {MAX_TP_SIZE}")
    path, values = _language_model(config)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in _MODELS:
        found = f"is {_shown(model_type)}" if "model_type" in values else "is missing"
        raise ModelConfigError(
            f"model config: model_type {found}: supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    return _MODELS[model_type](_Keys(model_type, values, path), tp_size)


def _language_model(config: Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
    """The path to the object that describes the layers with a state, and that object.

    Multimodal wrappers nest it, and repeat some keys outside with other values (``kimi_k3`` around
    ``kimi_linear``). So a nested object of a supported type comes first. One without a ``model_type``
    completes the outer object, whose keys give way. One of another type is not about the state.
    """
    for key in _NESTED_IN:
        nested = config.get(key)
        if nested is None:
            continue
        if not isinstance(nested, Mapping):
            raise ModelConfigError(f"model config: {key} is {_shown(nested)}: expected an object")
        if "model_type" not in nested:
            return "", {**config, **nested}
        if nested["model_type"] in SUPPORTED_MODEL_TYPES:
            return f"{key}.", nested
    return "", config


@dataclass(frozen=True, slots=True)
class _Keys:
    """One object of a config, whose values are checked when they are read.

    ``path`` leads to the object from the outermost one, ``""`` or with a dot at its end.
    """

    model_type: str
    values: Mapping[str, object]
    path: str = ""

    def error(self, key: str, problem: str) -> ModelConfigError:
        return ModelConfigError(f"{self.model_type} config: {self.path}{key} {problem}")

    def given(self, key: str) -> bool:
        return self.values.get(key) is not None

    def value(self, key: str) -> object:
        value = self.values.get(key)
        if value is None:
            raise self.error(key, "is null" if key in self.values else "is missing")
        return value

    def size(self, key: str, least: int = 1, most: int = MAX_SIZE) -> int:
        value = self.value(key)
        # Not isinstance: a bool is an int to Python, and no config means it as a size.
        if type(value) is not int or not least <= value <= most:
            raise self.error(key, f"is {_shown(value)}: expected a whole number from {least} to {most}")
        return value

    def layer_count(self) -> int:
        return self.size("num_hidden_layers", most=MAX_LAYERS)

    def section(self, key: str) -> _Keys:
        value = self.value(key)
        if not isinstance(value, Mapping):
            raise self.error(key, f"is {_shown(value)}: expected an object")
        return _Keys(self.model_type, value, f"{self.path}{key}.")

    def layers(self, key: str, kinds: Mapping[str, bool], count: int | None = None) -> tuple[int, ...]:
        """The layers that keep a state, from a list (or a string of letters) of every layer's kind.

        ``kinds`` says of each accepted kind whether it keeps one; ``count`` is how many there must be.
        """
        listed = self.value(key)
        accepted = ", ".join(kinds)
        if not isinstance(listed, list | str):
            raise self.error(key, f"is {_shown(listed)}: expected the kind of every layer, of {accepted}")
        if count is not None and len(listed) != count:
            raise self.error(key, f"names {len(listed)} layers, but num_hidden_layers is {count}")
        if len(listed) > MAX_LAYERS:
            raise self.error(key, f"names {len(listed)} layers: expected at most {MAX_LAYERS}")
        for index, kind in enumerate(listed):
            if not isinstance(kind, str) or kind not in kinds:
                raise self.error(f"{key}[{index}]", f"is {_shown(kind)}: expected one of {accepted}")
        return self.some(key, tuple(index for index, kind in enumerate(listed) if kinds[kind]))

    def some(self, key: str, layer_ids: tuple[int, ...]) -> tuple[int, ...]:
        if not layer_ids:
            raise self.error(key, "leaves no layer that keeps a state: this model needs no pool")
        return layer_ids

    def ssm_dtype(self) -> str:
        """The dtype of temporal states, for those model types for which SGLang looks at the config.

        No other key counts, ``mamba_ssm_cache_dtype`` neither. For a name that it does not know SGLang
        warns and takes float32; here that is an error.
        """
        value = self.values.get("mamba_ssm_dtype")
        if value is None:
            return TEMPORAL_DTYPE
        if not isinstance(value, str) or value not in DTYPE_BYTES:
            raise self.error("mamba_ssm_dtype", f"is {_shown(value)}: expected one of {', '.join(DTYPE_BYTES)}")
        return value


@dataclass(frozen=True, slots=True)
class _Mamba2Keys:
    """What a model type calls the sizes of a Mamba-2 layer."""

    heads: str
    head_dim: str
    groups: str
    state_size: str
    conv_kernel: str


# A gated delta net keeps what a Mamba-2 layer keeps: values are its heads, keys its groups and states.
_QWEN3_NEXT_KEYS = _Mamba2Keys(
    heads="linear_num_value_heads",
    head_dim="linear_value_head_dim",
    groups="linear_num_key_heads",
    state_size="linear_key_head_dim",
    conv_kernel="linear_conv_kernel_dim",
)
# Not mamba_n_groups: SGLang takes that key too, but computes the state from n_groups.
_NEMOTRON_H_KEYS = _Mamba2Keys("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
_MAMBA_D_KEYS = _Mamba2Keys("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_MAMBA2_KEYS = _Mamba2Keys("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")

# transformers 5.15 renamed the kinds of layers; checkpoints on the hub have the old names.
_ATTENTION_KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}
_NEMOTRON_H_KINDS = {**_ATTENTION_KINDS, "mlp": False, "moe": False}
_NEMOTRON_H_LETTERS = {"M": True, "*": False, "-": False, "E": False}


def _qwen3_next(keys: _Keys, tp_size: int) -> StateShape:
    return _mamba2(keys, tp_size, _QWEN3_NEXT_KEYS, _qwen3_next_layers(keys), keys.ssm_dtype())


def _qwen3_next_layers(keys: _Keys) -> tuple[int, ...]:
    count = keys.layer_count()
    # SGLang reads the interval only. Checkpoints that transformers 5 saved have only the list.
    if keys.given("layer_types") and not keys.given("full_attention_interval"):
        return keys.layers("layer_types", _ATTENTION_KINDS, count)
    interval = keys.size("full_attention_interval")
    linear = tuple(layer for layer in range(count) if (layer + 1) % interval)
    return keys.some("full_attention_interval", linear)


def _nemotron_h(keys: _Keys, tp_size: int) -> StateShape:
    # The list comes first, as in SGLang and transformers; both let num_hidden_layers be anything. The
    # inner size is heads times head dim: "expand" is not kept up (9B-v2: 2 * 4480 is not 128 * 80).
    if keys.given("hybrid_override_pattern") and not keys.given("layers_block_type"):
        layers = keys.layers("hybrid_override_pattern", _NEMOTRON_H_LETTERS)
    else:
        layers = keys.layers("layers_block_type", _NEMOTRON_H_KINDS)
    return _mamba2(keys, tp_size, _NEMOTRON_H_KEYS, layers, keys.ssm_dtype())


def _falcon_h1(keys: _Keys, tp_size: int) -> StateShape:
    # Every layer has attention and Mamba side by side. Two defaults are rules, in transformers and in
    # SGLang: a null mamba_d_ssm is mamba_expand * hidden_size, and "auto" divides it by the heads.
    if "mamba_d_ssm" in keys.values and not keys.given("mamba_d_ssm"):
        inner = _expanded(keys, "mamba_expand")
    else:
        inner = keys.size("mamba_d_ssm")
    head_dim = None
    if keys.values.get("mamba_d_head", "auto") == "auto":
        head_dim = inner // keys.size("mamba_n_heads")
    layers = tuple(range(keys.layer_count()))
    return _mamba2(keys, tp_size, _MAMBA_D_KEYS, layers, keys.ssm_dtype(), head_dim, inner)


def _granitemoehybrid(keys: _Keys, tp_size: int) -> StateShape:
    # No default for layer_types: transformers takes all layers as Mamba, SGLang five of six.
    layers = keys.layers("layer_types", _ATTENTION_KINDS, keys.layer_count())
    inner = _expanded(keys, "mamba_expand")
    return _mamba2(keys, tp_size, _MAMBA_D_KEYS, layers, TEMPORAL_DTYPE, inner=inner)


def _mamba2_model(keys: _Keys, tp_size: int) -> StateShape:
    # transformers wants expand * hidden_size to be heads * head_dim and stores no intermediate_size;
    # SGLang reads one. Where it is given it must therefore be the same.
    inner = keys.size("intermediate_size") if keys.given("intermediate_size") else None
    layers = tuple(range(keys.layer_count()))
    return _mamba2(keys, tp_size, _MAMBA2_KEYS, layers, TEMPORAL_DTYPE, inner=inner)


def _mamba2(
    keys: _Keys,
    tp_size: int,
    names: _Mamba2Keys,
    layer_ids: tuple[int, ...],
    temporal_dtype: str,
    head_dim: int | None = None,
    inner: int | None = None,
) -> StateShape:
    """Conv ``(inner + 2 * groups * state, kernel - 1)`` over ranks, temporal ``(heads, head dim, state)``.

    ``head_dim`` stands for the key where a rule gives it; ``inner`` is what heads * head dim must be.
    """
    heads, groups = keys.size(names.heads), keys.size(names.groups)
    head_dim = keys.size(names.head_dim) if head_dim is None else head_dim
    if inner is not None and heads * head_dim != inner:
        raise keys.error(names.heads, f"is {heads}: with heads of {head_dim} that is not the inner size, {inner}")
    _check_tp_size(keys, tp_size, names.heads, heads, names.groups, groups)
    state_size = keys.size(names.state_size)
    heads_per_rank = heads // tp_size
    # Ranks beyond the groups share them: each keeps the one that its heads belong to.
    groups_per_rank = max(1, groups // tp_size)
    channels = heads_per_rank * head_dim + 2 * groups_per_rank * state_size
    return StateShape(
        keys.model_type,
        layer_ids,
        conv=((channels, _window(keys, names.conv_kernel)),),
        temporal=(heads_per_rank, head_dim, state_size),
        conv_dtype=CONV_DTYPE,
        temporal_dtype=temporal_dtype,
    )


def _mamba1(keys: _Keys, tp_size: int) -> StateShape:
    """Every channel is a head of its own; B and C come after the convolution, so it has none of them."""
    # intermediate_size first: falcon-mamba-7b has 8192 beside "expand": 16 and a hidden_size of 4096.
    stated = keys.given("intermediate_size") or not keys.given("expand")
    inner = keys.size("intermediate_size") if stated else _expanded(keys, "expand")
    _check_tp_size(keys, tp_size, "intermediate_size" if stated else "expand * hidden_size", inner)
    channels = inner // tp_size
    return StateShape(
        keys.model_type,
        tuple(range(keys.layer_count())),
        conv=((channels, _window(keys, "conv_kernel")),),
        temporal=(channels, 1, keys.size("state_size")),
        conv_dtype=CONV_DTYPE,
        temporal_dtype=TEMPORAL_DTYPE,
    )


def _kimi_linear(keys: _Keys, tp_size: int) -> StateShape:
    """Kimi delta attention: q, k and v of equal size in one conv state, the window before the channels."""
    linear = keys.section("linear_attn_config")
    heads, head_dim = linear.size("num_heads"), linear.size("head_dim")
    _check_tp_size(linear, tp_size, "num_heads", heads)
    heads_per_rank = heads // tp_size
    return StateShape(
        keys.model_type,
        _kda_layers(linear, keys.layer_count()),
        conv=((_window(linear, "short_conv_kernel_size"), 3 * heads_per_rank * head_dim),),
        temporal=(heads_per_rank, head_dim, head_dim),
        conv_dtype=CONV_DTYPE,
        temporal_dtype=TEMPORAL_DTYPE,
    )


def _kda_layers(linear: _Keys, count: int) -> tuple[int, ...]:
    listed = linear.value("kda_layers")
    if not isinstance(listed, list):
        raise linear.error("kda_layers", f"is {_shown(listed)}: expected a list of layer numbers")
    numbers = set()
    for index, number in enumerate(listed):
        if type(number) is not int or not 1 <= number <= count or number in numbers:
            raise linear.error(
                f"kda_layers[{index}]",
                f"is {_shown(number)}: expected each number once, counted from 1, up to {count}",
            )
        numbers.add(number)
    return linear.some("kda_layers", tuple(number - 1 for number in sorted(numbers)))


def _expanded(keys: _Keys, factor: str) -> int:
    return keys.size(factor) * keys.size("hidden_size")


def _window(keys: _Keys, kernel: str) -> int:
    """A convolution of width K looks back at K - 1 inputs, which are its state."""
    return keys.size(kernel, least=2) - 1


def _check_tp_size(
    keys: _Keys, tp_size: int, heads_key: str, heads: int, groups_key: str = "", groups: int = 1
) -> None:
    """Heads are divided among the ranks, and so are groups, or every rank has a copy of one.

    Where ranks neither divide the groups nor outnumber them, some rank would need parts of two.
    """

    def works(size: int) -> bool:
        return heads % size == 0 and (groups % size == 0 or groups < size)

    if works(tp_size):
        return
    accepted = [str(size) for size in range(1, MAX_TP_SIZE + 1) if works(size)]
    also = f" ({groups_key} {groups})" if groups_key else ""
    raise keys.error(
        heads_key,
        f"{heads}{also} cannot be divided among tp_size {tp_size}: accepted are {', '.join(accepted)}",
    )


def _shown(value: object) -> str:
    """The value, short whatever it is: it came from a file that may be anything."""
    try:
        return reprlib.repr(value)
    except ValueError:  # CPython refuses to print integers of more than 4300 digits
        return "a number with thousands of digits"


_MODELS: dict[str, Callable[[_Keys, int], StateShape]] = {
    "qwen3_next": _qwen3_next,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granitemoehybrid,
    "mamba2": _mamba2_model,
    "mamba": _mamba1,
    "falcon_mamba": _mamba1,
    "kimi_linear": _kimi_linear,
}

SUPPORTED_MODEL_TYPES: tuple[str, ...] = tuple(_MODELS)
