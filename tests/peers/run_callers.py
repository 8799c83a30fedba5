"""``make peers``: SGLang 0.5.23's own callers over mambapool's allocator, on a daemon of this run's own.

Arguments go to pytest, settings (``MUTANTS=1``, ``WORK``) to ``sglang_callers/run.sh``, which says what they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from daemons import start_daemon
from sglang_wheel import CALLERS


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="mambapool-peers-") as parent:
        daemon = start_daemon(Path(parent, "run"), slots=None)
        try:
            environment = {
                **os.environ,
                "MAMBAPOOL_DIR": str(daemon.dir),
                "PYTHON": sys.executable,
                "CANDIDATE": "mambapool.client.sglang:MambaSlotAllocator",
                "EXTRA_PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            }
            status = subprocess.run([CALLERS / "run.sh", *sys.argv[1:]], env=environment, check=False).returncode
            daemon.check()
        finally:
            daemon.close()
    return status


if __name__ == "__main__":
    sys.exit(main())
