from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from mambapool.pool.errors import ConfigError
from mambapool.service.options import (
    DURATION,
    MAX_DURATION_S,
    SIZE,
    dir_option,
    option,
    parse_duration,
    parse_size,
    parse_timeout,
    pool_options,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("5s", 5.0), ("2m", 120.0), ("1h", 3600.0), ("1.5s", 1.5), (" 3s ", 3.0), ("0s", 0.0)],
)
def test_a_duration_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1 s", "1d", "5S", "1e3s", "infs", "1.s", "٣s"])
def test_a_text_that_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a duration: .* 250ms") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["0s", "0.9ms", "0.0009s", "0h"])
def test_a_wait_in_which_nobody_can_answer_is_refused(text: str) -> None:
    assert parse_timeout("1ms") == pytest.approx(0.001)
    with pytest.raises(ConfigError, match=f"^'{text}' is too short to wait for an answer: 1ms at least"):
        parse_timeout(text)


@pytest.mark.parametrize("text", [f"{MAX_DURATION_S + 1}s", "999999999999h", "9" * 400 + "ms"])
def test_a_duration_that_zeromq_cannot_wait_is_refused(text: str) -> None:
    assert parse_duration(f"{MAX_DURATION_S}s") * 1000 < 2**31
    with pytest.raises(ConfigError, match=f"too long: {MAX_DURATION_S}s at most"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("1KiB", 1024),
        ("20GiB", 20 * 1024**3),
        ("1.5 MiB", 1024**2 * 3 // 2),
        ("2TiB", 2 * 1024**4),
        ("1KB", 1000),
        ("20GB", 20 * 1000**3),
        ("3TB", 3 * 1000**4),
        ("9007199254740993", 9007199254740993),
        ("0.1GB", 100_000_000),
    ],
)
def test_a_size_is_exact_in_units_of_1024_or_1000(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_size_of_many_digits_is_a_number_like_any_other() -> None:
    assert parse_size("9" * 400) == int("9" * 400)


@pytest.mark.parametrize("text", ["", "GiB", "20Gib", "20gb", "20 Gi", "-1GiB", "1,5GiB", "1e9", "nan"])
def test_a_text_that_is_no_size_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a size: .*KiB, MiB, GiB.*KB, MB, GB") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@click.command()
@option("--some-time", "wait", type=DURATION, default="2s", show_default=True, help="How long.")
@option("--size", type=SIZE)
@option("--word", "words", multiple=True)
@dir_option
def command(wait: float, size: int | None, words: tuple[str, ...], directory: str | None) -> None:
    click.echo(f"{wait} {size} {words} {directory}")


def run(*arguments: str, **environment: str) -> str:
    result = CliRunner().invoke(command, arguments, env=environment)
    assert not result.exception or isinstance(result.exception, SystemExit)
    return result.output.strip()


def test_a_flag_is_also_an_environment_variable_and_wins_over_it() -> None:
    assert run() == "2.0 None () None"
    environment = {"MAMBAPOOL_SOME_TIME": "1m", "MAMBAPOOL_SIZE": "1KiB", "MAMBAPOOL_DIR": "/a"}
    assert run(**environment) == "60.0 1024 () /a"
    assert run("--some-time", "3s", "--size", "1KB", "--dir", "/b", **environment) == "3.0 1000 () /b"


def test_a_repeatable_flag_is_split_at_blanks_in_the_environment() -> None:
    assert run(MAMBAPOOL_WORD="a  b\tc") == "2.0 None ('a', 'b', 'c') None"
    assert run("--word", "d e", MAMBAPOOL_WORD="a b") == "2.0 None ('d e',) None"


def test_help_names_the_variable_and_the_default() -> None:
    text = " ".join(run("--help").split())
    assert "How long. [env var: MAMBAPOOL_SOME_TIME; default: 2s]" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--some-time", "5"), "'--some-time'"),
        (("--size", "much"), "'--size'"),
        (("--dir", ""), "'--dir'"),
    ],
)
def test_what_a_parser_refuses_is_a_usage_error_that_names_the_flag(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_pool_options_come_in_the_order_in_which_help_shows_them() -> None:
    @click.command()
    @pool_options(required_slots=True, slots_help="So many.")
    def pooled(**_values: object) -> None:
        """Takes a pool."""

    names = [parameter.opts[0] for parameter in pooled.params]
    assert names == ["--pool", "--slots", "--model", "--state", "--tp-size", "--device"]
    assert "'--slots'" in CliRunner().invoke(pooled, []).output


def test_a_click_whose_parameter_types_are_not_generic_will_do() -> None:
    program = (
        "import click\n"
        "click.ParamType = type('ParamType', (), {'fail': None})\n"
        "from mambapool.service.options import DURATION\n"
        "print(DURATION.convert('2s', None, None))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "2.0\n", done.stderr
