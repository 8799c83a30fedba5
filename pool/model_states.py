"""What each model type keeps per request: which of its layers, and the shapes of their states.

The rules are :mod:`mambapool.pool.models`'; one function per model type reads its keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mambapool.pool.layout import MAX_TP_SIZE, Geometry, TensorSpec
from mambapool.pool.model_config import TEMPORAL_DTYPE, Keys, shown

#: SGLang keeps conv states in bfloat16 whatever ``torch_dtype`` says; only its environment changes that.
CONV_DTYPE = "bfloat16"


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


def _qwen3_next(keys: Keys, tp_size: int) -> StateShape:
    return _mamba2(keys, tp_size, _QWEN3_NEXT_KEYS, _qwen3_next_layers(keys), keys.ssm_dtype())


def _qwen3_next_layers(keys: Keys) -> tuple[int, ...]:
    count = keys.layer_count()
    # SGLang reads the interval only. Checkpoints that transformers 5 saved have only the list.
    if keys.given("layer_types") and not keys.given("full_attention_interval"):
        return keys.layers("layer_types", _ATTENTION_KINDS, count)
    interval = keys.size("full_attention_interval")
    linear = tuple(layer for layer in range(count) if (layer + 1) % interval)
    return keys.some("full_attention_interval", linear)


def _nemotron_h(keys: Keys, tp_size: int) -> StateShape:
    # The list comes first, as in SGLang and transformers; both let num_hidden_layers be anything. The
    # inner size is heads times head dim: "expand" is not kept up (9B-v2: 2 * 4480 is not 128 * 80).
    if keys.given("hybrid_override_pattern") and not keys.given("layers_block_type"):
        layers = keys.layers("hybrid_override_pattern", _NEMOTRON_H_LETTERS)
    else:
        layers = keys.layers("layers_block_type", _NEMOTRON_H_KINDS)
    return _mamba2(keys, tp_size, _NEMOTRON_H_KEYS, layers, keys.ssm_dtype())


def _falcon_h1(keys: Keys, tp_size: int) -> StateShape:
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


def _granitemoehybrid(keys: Keys, tp_size: int) -> StateShape:
    # No default for layer_types: transformers takes all layers as Mamba, SGLang five of six.
    layers = keys.layers("layer_types", _ATTENTION_KINDS, keys.layer_count())
    inner = _expanded(keys, "mamba_expand")
    return _mamba2(keys, tp_size, _MAMBA_D_KEYS, layers, TEMPORAL_DTYPE, inner=inner)


def _mamba2_model(keys: Keys, tp_size: int) -> StateShape:
    # transformers wants expand * hidden_size to be heads * head_dim and stores no intermediate_size;
    # SGLang reads one. Where it is given it must therefore be the same.
    inner = keys.size("intermediate_size") if keys.given("intermediate_size") else None
    layers = tuple(range(keys.layer_count()))
    return _mamba2(keys, tp_size, _MAMBA2_KEYS, layers, TEMPORAL_DTYPE, inner=inner)


def _mamba2(
    keys: Keys,
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


def _mamba1(keys: Keys, tp_size: int) -> StateShape:
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


def _kimi_linear(keys: Keys, tp_size: int) -> StateShape:
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


def _kda_layers(linear: Keys, count: int) -> tuple[int, ...]:
    listed = linear.value("kda_layers")
    if not isinstance(listed, list):
        raise linear.error("kda_layers", f"is {shown(listed)}: expected a list of layer numbers")
    numbers = set()
    for index, number in enumerate(listed):
        if type(number) is not int or not 1 <= number <= count or number in numbers:
            raise linear.error(
                f"kda_layers[{index}]",
                f"is {shown(number)}: expected each number once, counted from 1, up to {count}",
            )
        numbers.add(number)
    return linear.some("kda_layers", tuple(number - 1 for number in sorted(numbers)))


def _expanded(keys: Keys, factor: str) -> int:
    return keys.size(factor) * keys.size("hidden_size")


def _window(keys: Keys, kernel: str) -> int:
    """A convolution of width K looks back at K - 1 inputs, which are its state."""
    return keys.size(kernel, least=2) - 1


def _check_tp_size(
    keys: Keys, tp_size: int, heads_key: str, heads: int, groups_key: str = "", groups: int = 1
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


#: Model type → the state of one of so many ranks.
MODELS: dict[str, Callable[[Keys, int], StateShape]] = {
    "qwen3_next": _qwen3_next,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granitemoehybrid,
    "mamba2": _mamba2_model,
    "mamba": _mamba1,
    "falcon_mamba": _mamba1,
    "kimi_linear": _kimi_linear,
}
