"""Values of flags: parsed once, for the command line and the configuration file alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from mambapool.pool.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # takes no parameter before click 8.4

#: ZeroMQ takes waits as milliseconds in 32 bits: 24 days.
MAX_DURATION_S = 2**31 // 1000

#: No memory has more bytes; Python reads no number of more than 4,300 digits.
_MOST_SIZE_DIGITS = 1000

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_UNITS_BYTES = {"": 1, "B": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for ending, base in (("iB", 1024), ("B", 1000))
}


def parse_duration(text: str) -> float:
    """Seconds of ``250ms``, ``5s``, ``2m``, ``1h``."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a duration: expected a number and ms, s, m or h, for example 250ms")
    seconds = float(match[1]) * _UNITS_S[match[2]]
    if seconds > MAX_DURATION_S:
        raise ConfigError(f"{text!r} is too long: {MAX_DURATION_S}s at most")
    return seconds


def parse_timeout(text: str) -> float:
    """A duration in which something can answer: ZeroMQ counts in milliseconds."""
    seconds = parse_duration(text)
    if seconds < 0.001:
        raise ConfigError(f"{text!r} is too short to wait for an answer: 1ms at least")
    return seconds


def parse_size(text: str) -> int:
    """Bytes of ``20GiB`` (1024ⁿ), ``20GB`` (1000ⁿ) or a plain number."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS_BYTES:
        raise ConfigError(
            f"{text!r} is not a size: expected a number and KiB, MiB, GiB, TiB (1024ⁿ) or KB, MB, GB, TB (1000ⁿ)"
        )
    if len(match[1]) > _MOST_SIZE_DIGITS:
        raise ConfigError(f"a size of {len(match[1])} digits is too large: {_MOST_SIZE_DIGITS} at most")
    return int(Fraction(match[1]) * _UNITS_BYTES[match[2]])


class _Parsed(_ParamType):
    """A flag whose text one of the parsers above reads."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


DURATION = _Parsed("duration", parse_duration)
TIMEOUT = _Parsed("duration", parse_timeout)
SIZE = _Parsed("size", parse_size)


def option(*names: str, **attributes: Any) -> Callable[[F], F]:
    """A click option that can also be set by ``MAMBAPOOL_`` + its name; repeatable ones split at blanks."""
    flag = next(name for name in names if name.startswith("--"))
    variable = "MAMBAPOOL_" + flag.removeprefix("--").split("/")[0].replace("-", "_").upper()
    return click.option(*names, envvar=variable, show_envvar=True, **attributes)


def refuse_empty(_context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """`--dir "$UNSET"` would mean the directory that one happens to be in, `--model "$UNSET"` none at all."""
    if value == "":
        raise click.BadParameter(
            f"the name of the {'directory' if parameter.name == 'directory' else 'file'} is empty"
        )
    return value


def file_completion(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The shell's own completion of files."""
    return [CompletionItem(begun, type="file")]


def _directory_completion(
    _context: click.Context, _parameter: click.Parameter, begun: str
) -> list[CompletionItem]:
    return [CompletionItem(begun, type="dir")]


dir_option = option(
    "--dir",
    "directory",
    metavar="DIR",
    shell_complete=_directory_completion,
    callback=refuse_empty,
    help="Runtime directory: sockets, locks, slot tables. Default: $XDG_RUNTIME_DIR/mambapool, else "
    "/run/mambapool if it can be written, else /tmp/mambapool-UID.",
)
quarantine_option = option(
    "--quarantine",
    type=DURATION,
    metavar="T",
    help="Keep a dead process's slots on a GPU back for so long, and until it has ended.  [default: 1s]",
)
timeout_option = option(
    "--timeout", type=TIMEOUT, default="2s", show_default=True, metavar="T", help="Wait so long for it."
)
json_option = option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def pool_options(*, required_slots: bool, slots_help: str) -> Callable[[F], F]:
    """The flags that describe one pool, for serve and keeper."""
    decorators = (
        option("--pool", default="default", show_default=True, metavar="NAME", help="Name of the pool."),
        option("--slots", type=int, metavar="N", required=required_slots, help=slots_help),
        option(
            "--model",
            metavar="CONFIG.json",
            callback=refuse_empty,
            shell_complete=file_completion,
            help="Compute the state from a model's config.json.",
        ),
        option(
            "--state",
            "states",
            multiple=True,
            metavar="NAME=DTYPE:LxDxD…",
            help="A tensor of the state, layers first, without the slot dimension: "
            "conv=bfloat16:4x96x3 is [4, N + 1, 96, 3]. Repeatable.",
        ),
        option(
            "--tp-size",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            metavar="T",
            help="Tensor-parallel ranks: T shards, each kept by a process of its own.",
        ),
        option(
            "--device",
            type=click.Choice(["cpu", "cuda"]),
            default="cpu",
            show_default=True,
            help="Where the states live: cpu is shared memory of this host; with cuda each rank has a GPU.",
        ),
    )

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate
