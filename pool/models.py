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

from collections.abc import Mapping

from mambapool.pool.errors import ModelConfigError
from mambapool.pool.layout import MAX_TP_SIZE
from mambapool.pool.model_config import Keys, load_model_config, shown
from mambapool.pool.model_states import MODELS, StateShape

__all__ = ["SUPPORTED_MODEL_TYPES", "StateShape", "load_model_config", "state_shape"]

SUPPORTED_MODEL_TYPES: tuple[str, ...] = tuple(MODELS)

#: Where wrappers keep their language model. (SGLang knows more names, for models without a state.)
_NESTED_IN = ("llm_config", "text_config")


def state_shape(config: Mapping[str, object], tp_size: int = 1) -> StateShape:
    """The state of one of ``tp_size`` equal ranks of the model that ``config`` describes."""
    if not isinstance(config, Mapping):
        raise ModelConfigError(f"model config is {shown(config)}: expected an object")
    if type(tp_size) is not int or not 1 <= tp_size <= MAX_TP_SIZE:
        raise ModelConfigError(f"tp_size {shown(tp_size)}: expected a whole number from 1 to {MAX_TP_SIZE}")
    path, values = _language_model(config)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODELS:
        found = f"is {shown(model_type)}" if "model_type" in values else "is missing"
        raise ModelConfigError(
            f"model config: model_type {found}: supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    return MODELS[model_type](Keys(model_type, values, path), tp_size)


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
            raise ModelConfigError(f"model config: {key} is {shown(nested)}: expected an object")
        if "model_type" not in nested:
            return "", {**config, **nested}
        if nested["model_type"] in SUPPORTED_MODEL_TYPES:
            return f"{key}.", nested
    return "", config
