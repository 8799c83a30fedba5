"""The commands as a whole: help, version, how they are started, and what they do not import."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from daemons import Daemon, mambapool

from mambapool.pool.version import VERSION
from mambapool.service.cli import command_line

COMMANDS = {
    "serve": {
        *("--pool", "--slots", "--model", "--state", "--tp-size", "--device", "--quarantine", "--config"),
        "--dir",
    },
    "keeper": {
        "--pool",
        "--slots",
        "--model",
        "--state",
        "--tp-size",
        "--device",
        "--rank",
        "--exit-idle",
        "--dir",
    },
    "allocator": {"--pool", "--slots", "--quarantine", "--wait", "--exit-idle", "--dir"},
    "status": {"--keeper", "--pool", "--rank", "--dir", "--json"},
    "audit": {"--older-than", "--dir", "--json"},
    "geometry": {"--model", "--tp-size", "--memory", "--json"},
    "doctor": {"--dir", "--device", "--json"},
    "bench": {"--goal", "--quick", "--json"},
    "replay": {
        "TRACE",
        "--schedulers",
        "--route",
        "--track",
        "--step-ms",
        "--speed",
        "--device",
        "--plot",
        "--elsewhere",
        "--json",
        "--dir",
    },
    "scheduler": {"--name", "--wait", "--dir"},
    "config show": {"--pool", "--slots", "--config", "--max-waiters", "--quarantine", "--dir", "--json"},
    "completion": set[str](),
}

#: Runs each of several command lines, given as JSON, in one process in which some modules cannot be had.
WITHOUT = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Absent())
from mambapool.service.cli import main
for arguments in json.loads(sys.argv[2]):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (arguments, ended.code)
    else:
        raise AssertionError(f"{arguments} did not exit")
"""


def test_help_names_every_command_in_one_whole_line() -> None:
    result = CliRunner().invoke(command_line, ["--help"])
    assert result.exit_code == 0
    described = {line.split()[0]: line for line in result.output.splitlines() if line.startswith("  ")}
    for name in {command.split()[0] for command in COMMANDS}:
        assert described[name].endswith("."), described[name]
        assert not described[name].endswith("..."), described[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_names_its_flags_and_their_variables(name: str) -> None:
    result = CliRunner().invoke(command_line, [*name.split(), "--help"])
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    missing = {flag for flag in COMMANDS[name] if flag not in text}
    assert not missing
    for flag in COMMANDS[name] - {"TRACE"}:
        assert f"MAMBAPOOL_{flag[2:].replace('-', '_').upper()}" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_is_its_manual_page(name: str) -> None:
    """What it does, examples that are command lines of it, every exit status, the environment."""
    output = CliRunner().invoke(command_line, [*name.split(), "--help"], terminal_width=80).output
    for title in ("Examples:", "Exit status:", "Environment:"):
        assert f"\n{title}\n" in output, title
    page = output.partition("\nExamples:\n")[2]
    examples, _, rest = page.partition("\nExit status:\n")
    exits, _, environment = rest.partition("\nEnvironment:\n")
    lines = [line.strip() for line in examples.splitlines() if line.startswith("    ")]
    assert lines
    assert all(f"mambapool {name}" in line for line in lines)
    statuses = {int(line.split()[0]) for line in exits.splitlines() if line.strip() and line[2] != " "}
    assert {0, 2} <= statuses <= {0, 1, 2, 3, 4}
    assert "MAMBAPOOL_" in environment


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_flags_and_files(shell: str) -> None:
    script = mambapool("completion", shell)
    assert (script.returncode, script.stderr) == (0, "")
    assert "_MAMBAPOOL_COMPLETE" in script.stdout

    def complete(words: str) -> str:
        # What the script asks; fish says which word is not finished, the others how many words there are.
        word = words.split(" ")[-1] if shell == "fish" else str(words.count(" "))
        asked = {"COMP_WORDS": words, "COMP_CWORD": word, "_MAMBAPOOL_COMPLETE": f"{shell}_complete"}
        answer = CliRunner().invoke(
            command_line, [], prog_name="mambapool", complete_var="_MAMBAPOOL_COMPLETE", env=asked
        )
        return answer.output

    assert "status" in complete("mambapool st")
    assert "--slots" in complete("mambapool serve --sl")
    assert "file" in complete("mambapool serve --config po")
    assert "dir" in complete("mambapool status --dir /ru")
    assert "show" in complete("mambapool config s")


def test_the_command_lines_in_the_help_of_serve_can_be_copied() -> None:
    output = CliRunner().invoke(command_line, ["serve", "--help"]).output
    examples = [line.strip() for line in output.splitlines() if line.strip().startswith("mambapool serve")]
    assert len(examples) == 3
    assert examples[-1] == "mambapool serve --config pools.toml"
    assert all(example.startswith("mambapool serve --slots ") for example in examples[:-1])


def test_the_version_is_the_packages() -> None:
    done = mambapool("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"mambapool, version {VERSION}\n", "")


def test_an_unknown_command_is_named_and_help_is_pointed_at() -> None:
    done = mambapool("frobnicate")
    assert done.returncode == 2
    assert "'frobnicate'" in done.stderr
    assert "mambapool --help" in done.stderr
    assert not done.stdout


def test_the_module_and_the_console_script_are_one() -> None:
    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["mambapool"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    # What pip writes into bin/mambapool.
    script = f"import sys; sys.argv[0] = 'mambapool'; from {module} import {function}; sys.exit({function}())"
    command = [sys.executable, "-c", script, "serve", "--slots", "x"]
    by_script = subprocess.run(command, capture_output=True, text=True, check=False)
    by_module = mambapool("serve", "--slots", "x")
    assert by_script.returncode == by_module.returncode == 2
    assert by_script.stderr == by_module.stderr
    assert by_script.stderr.startswith("Usage: mambapool serve")


def without(modules: str, *command_lines: str) -> subprocess.CompletedProcess[str]:
    """Run command lines where ``modules`` (separated by commas) are not installed."""
    lines = json.dumps([line.split() for line in command_lines])
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, modules, lines], capture_output=True, text=True, check=False
    )


def test_help_and_status_need_no_torch_and_what_does_not_draw_no_rich(daemon: Daemon) -> None:
    status = f"status --dir {daemon.dir}"
    done = without("torch", *(f"{name} --help" for name in COMMANDS), status)
    assert done.returncode == 0, done.stderr
    assert "default" in done.stdout

    done = without("torch,rich", "--version", f"{status} --json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["pid"] == daemon.allocator_pid
