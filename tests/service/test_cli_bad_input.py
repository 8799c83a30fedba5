"""What people mistype: every command names what was wrong in one line, with a status, and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import mambapool

from mambapool.pool.memory_limits import available_memory

STATE_SHAPES: list[dict[str, Any]] = json.loads(
    Path(__file__).parents[1].joinpath("data", "state_shapes.json").read_text()
)

#: What click says before its line: "Usage: …", "Try …" and an empty line.
USAGE_LINES = 3

USAGE, FAILED, NOT_REACHABLE = 2, 1, 4

STATE = "--state c=float32:1x2"

BAD = [
    # Arguments. `{}` is a directory with the files below, `run` in it the runtime directory.
    ("serve --slots 0", USAGE, "slots 0: expected a whole number from 1 to 2147483646"),
    ("serve --slots -1", USAGE, "slots -1: expected"),
    ("serve --slots abc", USAGE, "'--slots' (env var: 'MAMBAPOOL_SLOTS'): 'abc' is not a valid integer"),
    ("serve --slots 2147483647", USAGE, "slots 2147483647: expected"),
    (f"serve {STATE}", USAGE, "--model and --state need --slots N"),
    ("serve --slots 4 --state conv", USAGE, "--state 'conv': expected NAME=DTYPE:LAYERSxDIMxDIM"),
    ("serve --slots 4 --state c=int8:1x2", USAGE, "dtype 'int8' is not one of float32, float16, bfloat16"),
    ("serve --slots 4 --state c=float32:1x0", USAGE, "tensor c: size 0"),
    (f"serve --slots 4 {STATE} {STATE}", USAGE, "tensor c is named twice"),
    (f"serve --slots 4 {STATE} --model {{}}/qwen.json", USAGE, "--model and --state both"),
    ("serve --slots 4 --model {}/nothing.json", USAGE, "{}/nothing.json cannot be read (No such file"),
    ("serve --slots 4 --model {}/llama.json", USAGE, "'llama'"),
    ("serve --slots 4 --model {}/text.json", USAGE, "{}/text.json is not JSON"),
    ("serve --slots 4 --tp-size 2", USAGE, "--tp-size needs --model or --state"),
    (f"serve --slots 4 {STATE} --tp-size 0", USAGE, "'--tp-size' (env var: 'MAMBAPOOL_TP_SIZE'): 0 is not in"),
    ("serve --slots 4 --model {}/qwen.json --tp-size 3", USAGE, "tp_size 3"),
    ("serve --slots 4 --pool Engine/0", USAGE, "pool name 'Engine/0'"),
    ("serve --slots 4 --max-sessions 0", USAGE, "sessions 0"),
    ("serve --slots 4 --device cuda", USAGE, "--device cuda needs --model or --state"),
    ("serve --slots 4 --device tpu", USAGE, "'tpu' is not one of 'cpu', 'cuda'"),
    ("serve --slots 4 --frobnicate", USAGE, "--frobnicate"),
    ("serve --slots 4 stray", USAGE, "stray"),
    ("serve --config {}/nothing.toml", USAGE, "--config {}/nothing.toml: No such file"),
    ("serve --config {}/bad.toml", USAGE, "{}/bad.toml, [[pool]] 1: unknown key 'slot'"),
    (f"keeper {STATE}", USAGE, "Missing option '--slots'"),
    ("keeper --slots 4", USAGE, "a keeper needs --model or --state"),
    (f"keeper --slots 4 {STATE} --rank 2 --tp-size 2", USAGE, "rank 2: expected a whole number from 0 to 1"),
    ("allocator --slots 0", USAGE, "slots 0: expected"),
    ("allocator --slots 4 --max-sessions 65537", USAGE, "sessions 65537"),
    ("status --timeout 5", USAGE, "'5' is not a duration"),
    ("status --timeout 999999999h", USAGE, "'999999999h' is too long"),
    ("status", NOT_REACHABLE, "no daemon is ready in {}/run"),
    ("audit --older-than 5", USAGE, "'5' is not a duration"),
    ("audit --older-than -1s", USAGE, "'-1s' is not a duration"),
    ("audit", NOT_REACHABLE, "no daemon is ready in {}/run"),
    ("geometry", USAGE, "Missing option '--model'"),
    ("geometry --model {}/qwen.json --memory 20Gib", USAGE, "'20Gib' is not a size"),
    ("geometry --model {}/qwen.json --tp-size 3", USAGE, "linear_num_value_heads 32"),
    ("replay", USAGE, "Missing argument 'TRACE...'"),
    ("replay {}/trace.jsonl", NOT_REACHABLE, "no daemon is ready in {}/run"),
    # Places.
    (
        "serve --slots 4 --dir {}/open",
        FAILED,
        "{}/open can be written by others (mode 0777); run: chmod 700 {}/open",
    ),
    ("keeper --slots 4 --state c=float32:1x2 --dir {}/open", FAILED, "{}/open can be written by others"),
    ("serve --slots 4 --dir {}/text.json", FAILED, "{}/text.json: File exists"),
    ("serve --slots 4 --dir {}/text.json/run", FAILED, "{}/text.json/run: Not a directory"),
    (f"serve --slots 4 --dir {{}}/{'long' * 25}", FAILED, "the kernel takes 107"),
    (f"status --dir {{}}/{'long' * 25}", NOT_REACHABLE, "no daemon is ready in {}/longlong"),
]


#: Runs the command lines that come as JSON, each as ``python -m mambapool.service`` does, in one process.
RUN = """
import contextlib, io, json, sys, traceback
from mambapool.service.cli import main
ended = []
for line in json.load(sys.stdin):
    sys.argv[1:] = line.split()
    stdout, stderr, status = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            main()
        except SystemExit as exit:
            status = exit.code
        except BaseException:
            traceback.print_exc()
    ended.append([status, stdout.getvalue(), stderr.getvalue()])
json.dump(ended, sys.stdout)
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Files that can be named in the command lines above; they stay as they are."""
    place = Path(tempfile.mkdtemp(prefix="mambapool-"))
    (place / "qwen.json").write_text(json.dumps(STATE_SHAPES[0]["config"]))
    (place / "llama.json").write_text('{"model_type": "llama"}')
    (place / "text.json").write_text("no JSON at all")
    (place / "bad.toml").write_text("[[pool]]\nslot = 4\n")
    (place / "open").mkdir()
    (place / "open").chmod(0o777)
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    yield place
    after = {path: path.stat().st_mtime_ns for path in place.rglob("*") if place / "run" not in path.parents}
    after.pop(place / "run", None)
    shutil.rmtree(place)
    assert after == before


@pytest.fixture(scope="module")
def ended(place: Path) -> dict[str, tuple[int, str, str]]:
    """Status, stdout and stderr of every line."""
    lines = [line for line, _, _ in BAD]
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps([line.replace("{}", str(place)) for line in lines]),
        env={**os.environ, "MAMBAPOOL_DIR": str(place / "run")},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(lines, json.loads(done.stdout), strict=True))


def the_line(stderr: str) -> str:
    """The one line that says what was wrong; before it there may be click's pointer at the help."""
    lines = stderr.splitlines()
    if lines[0].startswith("Usage: mambapool"):
        assert lines[1].startswith("Try 'mambapool")
        assert lines[2] == ""
        lines = lines[USAGE_LINES:]
        assert lines[0].startswith("Error: ")
    else:
        assert lines[0].startswith("mambapool: ")
    assert len(lines) == 1, stderr
    return lines[0]


@pytest.mark.parametrize(("line", "status", "said"), BAD, ids=[line.replace("{}", ".") for line, _, _ in BAD])
def test_a_mistake_is_named(
    place: Path, ended: dict[str, tuple[int, str, str]], line: str, status: int, said: str
) -> None:
    code, stdout, stderr = ended[line]
    assert said.replace("{}", str(place)) in the_line(stderr)
    assert (code, stdout) == (status, "")


def test_more_memory_than_there_is_is_refused_with_both_numbers_and_nothing_is_left(runtime_dir: Path) -> None:
    available = available_memory()
    assert available is not None
    slots = available.size_bytes // 2**20
    # Each of two shards would fit alone, and both do not.
    state = "c=float32:1x196608"
    done = mambapool("serve", "--dir", str(runtime_dir), "--slots", str(slots), "--state", state, "--tp-size", "2")
    assert done.returncode == FAILED
    line = the_line(done.stderr)
    assert f"needs {2 * (slots + 1) * 4 * 196608} bytes" in line
    assert "bytes" in line.partition(" are available by ")[0].rpartition("), ")[2]
    assert {path.name for path in runtime_dir.iterdir()} == {"serve.lock", "leases"}

    alone = mambapool("keeper", "--dir", str(runtime_dir), "--slots", str(4 * slots), "--state", state)
    assert alone.returncode == FAILED
    assert f"needs {(4 * slots + 1) * 4 * 196608} bytes" in the_line(alone.stderr)
    assert {path.name for path in runtime_dir.iterdir()} == {"serve.lock", "keeper-default-0.lock", "leases"}


def test_the_socket_of_a_long_pool_name_is_refused_before_anything_is_started(runtime_dir: Path) -> None:
    pool = "p" * 32
    directory = runtime_dir.parent / ("d" * (107 - len(f"{runtime_dir.parent}//keeper-{pool}-10.sock") + 1))
    state = ("--state", "c=float32:1x2")
    done = mambapool("serve", "--dir", str(directory), "--slots", "4", "--pool", pool, *state, "--tp-size", "11")
    assert done.returncode == FAILED
    assert f"{directory}/keeper-{pool}-10.sock has 108 bytes, the kernel takes 107" in the_line(done.stderr)
    assert [path.name for path in directory.iterdir()] == ["leases"]
