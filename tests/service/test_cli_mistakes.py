"""Every command × every kind of mistake that its arguments allow: one line that names a reason, the right exit status,
nothing started, no traceback. Commands that are added later are tested with the flags that they have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from daemons import SMALL_STATE, Daemon, start_daemon

from mambapool.service.cli import command_line
from mambapool.service.options import DURATION, SIZE, TIMEOUT

USAGE, FAILED, NOT_REACHABLE = 2, 1, 4

TRACE = str(Path(__file__).parents[2] / "bench/traces/azure_llm_2023_conv_first_2000.csv")
MODEL = {"model_type": "mamba", "num_hidden_layers": 2, "state_size": 16, "hidden_size": 64, "conv_kernel": 4}

#: What is right otherwise. `{}` is a directory with the files below, `{daemon}` that of a daemon that runs.
RIGHT = {
    "serve": "--slots 4",
    "keeper": "--slots 4 --state c=float32:1x2",
    "allocator": "--slots 4",
    "config": "--slots 4",
    "status": "--dir {daemon}",
    "evict": "999999 --dir {daemon}",
    "geometry": "--model {}/config.json",
    "replay": f"{TRACE} --dir {{daemon}} --schedulers 1 --limit 1",
    "completion": "bash",
    "audit": "--dir {daemon}",
}

NUMBERS = (
    *("abc", "1.5", "", "1e3", "0x10", "９９x", "1 2", "--json", "-1"),
    *(str(2**63), str(2**64), "9" * 30, "9" * 5000),  # no int64, no uint64, nothing that Python reads as a number
)
POSITIVE_FLOATS = ("abc", "", "nan", "inf", "-1", "0", "1,5")
DURATIONS = ("5", "-1s", "soon", "", "1.s", "9" * 30 + "h", "9" * 5000 + "s", "nan s")
SIZES = ("20Gib", "-1GiB", "", "much", "1e9", "nan", "9" * 5000, "9" * 5000 + "GiB")
FILES = (
    *("{}/missing", "{}/folder", "{}/binary", "{}/empty", "{}/config.json/x", "{}/loop", "{}/deep", "{}/list"),
    *("{}/" + "n" * 300, "n/" * 2500, "a\0b", "\udcff\udcfe", ""),
    *("/dev/null", "/dev/zero", "{}/fifo", "{}/fifo.csv", "{}/endless", "{}/endless.jsonl"),
)
DIRECTORIES = (
    *("", "{}/config.json", "{}/config.json/x", "{}/open", "{}/loop", "{}/" + "long" * 25, "n/" * 2500),
    *("a\0b", "/proc/nothing/here", "{}/\udcff"),
)
TEXTS = {
    "--pool": ("Engine/0", "", "x" * 33, "a b", "a\0b", "é", ".."),
    "--state": (
        "conv",
        "=",
        "",
        "c=int8:1x2",
        "c=float32:1x0",
        "c=float32:",
        "c=float32:1x2x" + "9" * 30,
        "a\0=float32:1x2",
    ),
    "--route": ("best", "", "RR"),
    "--plot": ("picture", "x.gif", "", "{}/none/x.png", "{}/folder", "{}/folder.png", "{}/fifo.png"),
}


@dataclass
class Mistake:
    """A command line, and how it may end."""

    arguments: list[str]
    statuses: tuple[int, ...] = (USAGE,)
    environment: dict[str, str] = field(default_factory=dict)


def commands(group: click.Group, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *names, name)
        else:
            yield (*names, name), command


COMMANDS = dict(commands(command_line))


def mistakes(names: tuple[str, ...]) -> list[Mistake]:
    """Of one command. What is said last holds, so that each mistake is put behind what is right."""
    right = [*names, *RIGHT.get(names[0], "").split()]
    found = [
        Mistake([*right, "--frobnicate"]),
        Mistake([*right, "-z"]),
        Mistake([*right, "--frobnicate=1"]),
        Mistake([*right, "--", "stray", "\n"], (USAGE, FAILED)),
        Mistake([*names[:-1], names[-1] + "x"]),
    ]
    for parameter in COMMANDS[names].params:
        found += _of_argument(names, parameter) if isinstance(parameter, click.Argument) else []
        if isinstance(parameter, click.Option) and parameter.name != "help":
            found += _of_option(right, parameter)
    return found


def _of_argument(names: tuple[str, ...], argument: click.Argument) -> list[Mistake]:
    rest = RIGHT.get(names[0], "").split()[1:]
    found = [Mistake([*names, *rest])]
    if isinstance(argument.type, type(click.INT)):
        return found + [Mistake([*names, *rest, value]) for value in NUMBERS]
    if isinstance(argument.type, click.Choice):
        return found + [Mistake([*names, *rest, value]) for value in ("tcsh", "", "BASH", "bash zsh")]
    # No shell can pass a NUL, and click looks at a path's file by itself.
    files = [value for value in FILES if "\0" not in value]
    return found + [Mistake([*names, *rest, value], (USAGE, FAILED)) for value in files]


def _of_option(right: list[str], option: click.Option) -> list[Mistake]:
    flag = option.opts[0]
    if option.is_flag:
        return [Mistake([*right, f"{flag}=yes"])]
    found = [Mistake([*right, flag])]
    values, statuses = _bad_values(right, option)
    found += [Mistake([*right, flag, value], statuses) for value in values]
    if isinstance(option.type, type(click.INT)) and isinstance(option.envvar, str) and flag not in right:
        found.append(Mistake(right, statuses, {option.envvar: "many"}))
    return found


def _bad_values(right: list[str], option: click.Option) -> tuple[tuple[str, ...], tuple[int, ...]]:
    flag, kind = option.opts[0], option.type
    if flag == "--dir" and right[0] in ("config", "doctor"):
        return ("",), (USAGE,)  # one looks at no directory; of the other a bad one is what it finds
    if flag == "--dir":
        return DIRECTORIES, (USAGE, FAILED, NOT_REACHABLE)
    if flag in TEXTS:
        return TEXTS[flag], (USAGE,)
    if flag == "--config":  # one that says nothing may be
        return tuple(file for file in FILES if file != "{}/empty"), (USAGE,)
    if flag == "--model":
        return FILES, (USAGE,)
    if kind is DURATION:
        return DURATIONS, (USAGE,)
    if kind is TIMEOUT:
        return (*DURATIONS, "0s", "0ms", "0.5ms", "0.0000001s"), (USAGE,)
    if kind is SIZE:
        return SIZES, (USAGE,)
    if isinstance(kind, click.Choice):
        return ("nothing", "", "CPU "), (USAGE,)
    if kind is click.FLOAT:
        return POSITIVE_FLOATS, (USAGE,)
    if isinstance(kind, type(click.INT)):
        return NUMBERS, (USAGE,)
    return (), (USAGE,)


#: Runs command lines, each as ``python -m mambapool.service`` does, in one process; says what would have been started.
RUN = """
import contextlib, io, json, os, resource, sys, traceback
from mambapool.pool import keeper
from mambapool.pool.runtime_dir import RuntimeDir
from mambapool.service import serve, server
from mambapool.service.cli import main

# What reads a file that has no end fails, and takes no machine with it.
resource.setrlimit(resource.RLIMIT_DATA, (2 * 2**30, resource.RLIM_INFINITY))

def start(config, *_):
    RuntimeDir.for_server(config.dir)
    sys.stderr.write("STARTED")

serve.serve = keeper.keep = server.run_allocator = start
ended = []
for line, environment in json.load(sys.stdin):
    sys.argv[1:] = line
    before = dict(os.environ)
    os.environ.update(environment)
    stdout, stderr, status = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            main()
        except SystemExit as exit:
            status = exit.code
        except BaseException:
            traceback.print_exc()
    os.environ.clear()
    os.environ.update(before)
    ended.append([status, stdout.getvalue(), stderr.getvalue()])
json.dump(ended, sys.stdout)
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    import shutil
    import tempfile

    parent = Path(tempfile.mkdtemp(prefix="mambapool-"))
    daemon = start_daemon(parent / "run", slots=4, states=SMALL_STATE)
    yield daemon
    daemon.check()
    daemon.close()
    shutil.rmtree(parent)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    (place / "config.json").write_text(json.dumps(MODEL))
    (place / "binary").write_bytes(bytes(range(256)) * 10)
    (place / "empty").touch()
    (place / "deep").write_text("[" * 10_000)
    (place / "list").write_text('[1, {"a": "b"}]')
    (place / "loop").symlink_to(place / "loop")
    for name in ("fifo", "fifo.csv", "fifo.png"):
        os.mkfifo(place / name)
    for name in ("endless", "endless.jsonl"):
        (place / name).touch()
        os.truncate(place / name, 2**40)  # takes no room
    (place / "folder").mkdir()
    (place / "folder.png").mkdir()
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    return place


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_every_mistake_is_refused_with_a_reason(names: tuple[str, ...], place: Path, running: Daemon) -> None:
    made = mistakes(names)

    def filled(argument: str) -> str:
        return argument.replace("{daemon}", str(running.dir)).replace("{}", str(place))

    lines = [([filled(argument) for argument in each.arguments], each.environment) for each in made]
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(lines),
        env={**os.environ, "MAMBAPOOL_DIR": str(running.dir.parent / "none")},
        cwd=place,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    wrong = []
    for each, (line, _), (status, stdout, stderr) in zip(made, lines, json.loads(done.stdout), strict=True):
        reason = next((line for line in stderr.splitlines() if line.startswith(("Error: ", "mambapool: "))), "")
        is_right = status in each.statuses and not stdout and "Traceback" not in stderr and "STARTED" not in stderr
        if not is_right or len(reason) < 20:
            wrong.append((ascii(line)[:200], each.environment, status, stdout[:100], ascii(stderr[-300:])))
    assert not wrong, "\n".join(map(str, wrong))


def test_there_are_20_kinds_of_mistakes_for_each_command_that_runs_something() -> None:
    counts = {names: len(mistakes(names)) for names in COMMANDS}
    assert sum(counts.values()) > 400
    for name in ("serve", "keeper", "allocator", "status", "evict", "geometry", "replay"):
        assert counts[name,] >= 20, name


@pytest.mark.parametrize("directory", [each for each in DIRECTORIES if each], ids=ascii)
def test_the_doctor_finds_a_bad_directory_as_it_does_anything_else(directory: str, place: Path) -> None:
    result = CliRunner().invoke(command_line, ["doctor", "--json", "--dir", directory.replace("{}", str(place))])
    (found,) = [finding for finding in json.loads(result.stdout) if finding["what"] == "runtime directory"]
    assert (result.exit_code, found["state"], found["todo"]) == (FAILED, "bad", "name another with --dir")


def test_every_flag_but_one_has_an_environment_variable_as_the_help_says() -> None:
    without = [
        f"{' '.join(names)} {parameter.opts[0]}"
        for names, command in COMMANDS.items()
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.envvar is None
    ]
    assert without == ["evict --force"]
    assert "Every flag but `evict --force` has" in " ".join(
        CliRunner().invoke(command_line, ["--help"]).output.split()
    )


def test_a_group_without_a_command_shows_its_help() -> None:
    result = CliRunner().invoke(command_line, ["config"])
    assert "show" in result.output
    assert result.exit_code in (0, USAGE)
