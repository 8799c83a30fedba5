"""One pool, four schedulers, a real production trace: what `make demo` shows.

Starts the daemon in a temporary directory, replays the first 2,000 requests of the Mooncake conversation trace
on one shared pool, prints what happened, and leaves nothing behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TRACE = Path(__file__).parent.parent / "bench" / "traces" / "mooncake_conversation_trace.jsonl.gz"
MAMBAPOOL = [sys.executable, "-m", "mambapool.service"]

SERVE = ["--slots", "512", "--state", "conv=bfloat16:4x96x3", "--state", "temporal=float32:4x2x16x8"]
REPLAY = ["--schedulers", "4", "--limit", "2000"]


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="mambapool-demo-") as directory:
        environment = {**os.environ, "MAMBAPOOL_DIR": directory}
        show("serve", *SERVE)
        with subprocess.Popen(
            [*MAMBAPOOL, "serve", *SERVE],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as daemon:
            try:
                assert daemon.stdout is not None
                ready = daemon.stdout.readline()
                if not ready:
                    _, said = daemon.communicate()
                    print(said, file=sys.stderr)
                    return 1
                print(ready, end="", flush=True)
                show("replay", str(TRACE.relative_to(TRACE.parent.parent.parent)), *REPLAY)
                status = subprocess.run([*MAMBAPOOL, "replay", str(TRACE), *REPLAY], env=environment, check=False)
            finally:
                daemon.terminate()
                daemon.communicate()
        return status.returncode or daemon.returncode


def show(*command: str) -> None:
    print("$ mambapool", *command, flush=True)


if __name__ == "__main__":
    sys.exit(main())
