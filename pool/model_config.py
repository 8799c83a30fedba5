"""A model's ``config.json``: the file, and its keys, checked when they are read."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mambapool.pool.errors import ModelConfigError
from mambapool.pool.layout import DTYPE_BYTES
from mambapool.pool.regular_files import read_regular

#: Public configs have a few KiB; only a file named by mistake is larger.
MAX_CONFIG_BYTES = 16 * 2**20

# Far above any model. They keep a wrong file from costing minutes or gigabytes before it is refused.
MAX_SIZE = 2**24
MAX_LAYERS = 4096

#: SGLang's choice for temporal states: of most model types always, of the others without mamba_ssm_dtype.
TEMPORAL_DTYPE = "float32"


def load_model_config(path: str | os.PathLike[str]) -> dict[str, object]:
    """Read ``path``: a ``config.json``, or a directory that holds one."""
    file = Path(path)
    try:
        if file.is_dir():
            file /= "config.json"
        content = read_regular(file, MAX_CONFIG_BYTES)
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
        raise ModelConfigError(f"{file} holds {shown(config)}: expected a JSON object")
    return config


@dataclass(frozen=True, slots=True)
class Keys:
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
            raise self.error(key, f"is {shown(value)}: expected a whole number from {least} to {most}")
        return value

    def layer_count(self) -> int:
        return self.size("num_hidden_layers", most=MAX_LAYERS)

    def section(self, key: str) -> Keys:
        value = self.value(key)
        if not isinstance(value, Mapping):
            raise self.error(key, f"is {shown(value)}: expected an object")
        return Keys(self.model_type, value, f"{self.path}{key}.")

    def layers(self, key: str, kinds: Mapping[str, bool], count: int | None = None) -> tuple[int, ...]:
        """The layers that keep a state, from a list (or a string of letters) of every layer's kind.

        ``kinds`` says of each accepted kind whether it keeps one; ``count`` is how many there must be.
        """
        listed = self.value(key)
        accepted = ", ".join(kinds)
        if not isinstance(listed, list | str):
            raise self.error(key, f"is {shown(listed)}: expected the kind of every layer, of {accepted}")
        if count is not None and len(listed) != count:
            raise self.error(key, f"names {len(listed)} layers, but num_hidden_layers is {count}")
        if len(listed) > MAX_LAYERS:
            raise self.error(key, f"names {len(listed)} layers: expected at most {MAX_LAYERS}")
        for index, kind in enumerate(listed):
            if not isinstance(kind, str) or kind not in kinds:
                raise self.error(f"{key}[{index}]", f"is {shown(kind)}: expected one of {accepted}")
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
            raise self.error("mamba_ssm_dtype", f"is {shown(value)}: expected one of {', '.join(DTYPE_BYTES)}")
        return value


def shown(value: object) -> str:
    """The value, short whatever it is: it came from a file that may be anything."""
    try:
        return reprlib.repr(value)
    except ValueError:  # CPython refuses to print integers of more than 4300 digits
        return "a number with thousands of digits"
