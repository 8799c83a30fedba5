"""What ``mambapool doctor`` looks at for pools on a GPU. Nothing of CUDA is called in this process itself."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator

from mambapool.service.findings import Finding, bad, good, note

#: A driver that hangs is a finding, too.
TIMEOUT_S = 20.0


def look_at_gpus(*, wanted: bool) -> Iterator[Finding]:
    """``wanted``: without a GPU something does not work; else it is only said."""
    listed = _python("-m", "mambapool.pool.cuda_list")
    try:
        seen = json.loads(listed)
    except ValueError:
        seen = {"error": listed or "the driver did not answer"}
    if "error" in seen:
        lacking = bad if wanted else note
        todo = seen.get("todo") or "install NVIDIA's driver, or let this process see a GPU"
        yield lacking("GPU", seen["error"], "--device cuda cannot be used here; --device cpu can", todo)
        return
    yield _driver(seen["version"], has_context_events=seen["has_context_events"])
    for ordinal, device in enumerate(seen["devices"]):
        yield good(f"GPU {ordinal}", device, seen["visible"])
        yield _probe(ordinal)


def _driver(version: int, *, has_context_events: bool) -> Finding:
    text = f"CUDA {version // 1000}.{version % 1000 // 10}"
    if not has_context_events:
        return note(
            "driver",
            text,
            "it has no events on a whole context: a free needs to know the streams",
            "call worker.fence_streams([...]) in every worker, or update to a driver of CUDA 12.5 or newer",
        )
    return good("driver", text, "frees can be fenced with and without registered streams")


def _probe(ordinal: int) -> Finding:
    """Export in one child, import and write in another, read in the first."""
    what = f"sharing GPU {ordinal}"
    command = [sys.executable, "-m", "mambapool.pool.cuda_probe"]
    with subprocess.Popen(
        [*command, "export", str(ordinal)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as exporter:
        assert exporter.stdin is not None
        assert exporter.stdout is not None
        try:
            if not select.select([exporter.stdout], [], [], TIMEOUT_S)[0]:
                return _hangs(what, "exporter")
            descriptor = exporter.stdout.readline()
            if descriptor.startswith("error:") or not descriptor:
                said = descriptor.removeprefix("error: ").strip() or "the exporter died"
                return bad(what, said, "a keeper cannot keep a pool there", "see the reason")
            imported = _python(*command[1:], "import", str(ordinal), stdin=descriptor)
            if not imported:
                return _hangs(what, "importer")
            if imported != "written":
                return bad(
                    what,
                    imported.removeprefix("error: "),
                    "workers cannot map what a keeper exports",
                    "see the reason; in containers --pid=host --ipc=host",
                )
            read, _ = exporter.communicate("read\n", timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return _hangs(what, "exporter")
        finally:
            exporter.kill()
    if read.strip() != "same":
        return bad(what, "what was written is not there", "the two processes have different memory", "tell us")
    return good(what, "works between two processes", "a keeper and its workers see the same states")


def _hangs(what: str, who: str) -> Finding:
    text = f"the {who} did not answer within {TIMEOUT_S:g} s"
    return bad(what, text, "the driver hangs, or is very slow", "look at dmesg and nvidia-smi")


def _python(*arguments: str, stdin: str = "") -> str:
    """The last line that a child says; empty when it does not in time."""
    try:
        ended = subprocess.run(
            [sys.executable, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ""
    return (ended.stdout.strip() or ended.stderr.strip()).rpartition("\n")[2]
