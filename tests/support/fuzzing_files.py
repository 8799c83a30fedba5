"""Files that users have, spoiled at random: a model's ``config.json``, a configuration in TOML, traces.

Whatever is in them, they are read or refused with an error of ours that names the file.
"""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mambapool.client.replay import trace
from mambapool.pool.errors import MambaPoolError
from mambapool.pool.models import load_model_config, state_shape
from mambapool.service.config_file import read_config_file

SHAPES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "state_shapes.json").read_text())

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 7, 2**31, 2**63, 10**30, 0.5, float("nan"), float("inf"), 1e308),
    *("", "x", "float32", "bfloat16", "é\0", "9" * 5000, [], [[]], [0] * 99, ["M", "*", "-"], {}, {"a": {"a": 1}}),
)

_TOML = """dir = "/run/x"
max-sessions = 16
[[pool]]
pool = "engine-a"
slots = 512
state = ["conv=bfloat16:4x96x3", "temporal=float32:4x2x16x8"]
tp-size = 2
[[pool]]
slots = 3
device = "cpu"
"""

_MOONCAKE = '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n' * 3
_AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50,396,109\n"
)


def spoiled(chance: random.Random, text: str) -> bytes:
    """Its bytes with a few of them changed, cut out, doubled, or put in."""
    data = bytearray(text.encode())
    for _ in range(chance.randint(1, 4)):
        place, size = chance.randrange(len(data) + 1), chance.randint(1, 12)
        match chance.randrange(5):
            case 0:
                data[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[place : place + size]
            case 2:
                data[place:place] = data[place : place + size]
            case 3:
                data[place:place] = chance.choice(
                    (b"[" * 2000, b"\xff\xfe", b"\0", b"9" * 400, b"-", b"e999", b"'")
                )
            case _:
                del data[place:]
    return bytes(data)


def spoiled_config(chance: random.Random) -> bytes:
    """A model's configuration with some of its values replaced, left out or of another model."""
    config = copy.deepcopy(chance.choice(SHAPES)["config"])
    for _ in range(chance.randint(1, 4)):
        key = chance.choice(list(config) or ["x"])
        draw = chance.random()
        if draw < 0.6:
            config[key] = chance.choice(VALUES)
        elif draw < 0.8:
            config.pop(key, None)
        else:
            config |= chance.choice(SHAPES)["config"]
    text = json.dumps(config)
    return spoiled(chance, text) if chance.random() < 0.2 else text.encode()


def read_model(path: Path) -> None:
    shape = state_shape(load_model_config(path), random.Random(path.stat().st_size).choice((1, 1, 2, 4, 3)))
    assert shape.geometry().bytes_per_slot > 0


KINDS: dict[str, tuple[Callable[[random.Random], bytes], Callable[[Path], object]]] = {
    "config.json": (spoiled_config, read_model),
    "pools.toml": (lambda chance: spoiled(chance, _TOML), lambda path: read_config_file(str(path), {})),
    "trace.jsonl": (lambda chance: spoiled(chance, _MOONCAKE), trace.load),
    "trace.csv": (lambda chance: spoiled(chance, _AZURE), trace.load),
}


def fuzz_files(directory: Path, chance: random.Random, seconds: float = 0.0, at_least: int = 0) -> int:
    """Read spoiled files for so long, and at least so many; how many there were. Raises what is no error of ours."""
    count = 0
    end = time.monotonic() + seconds
    while count < at_least or time.monotonic() < end:
        name = chance.choice(list(KINDS))
        make, read = KINDS[name]
        path = directory / name
        path.write_bytes(make(chance))
        count += 1
        try:
            read(path)
        except MambaPoolError as error:
            said = str(error)
        else:
            continue
        assert said, f"{name} was refused without a reason"
        assert "\n" not in said, said
    return count
