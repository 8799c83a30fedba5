"""SGLang's code without a server: its wheel and what that imports, where ``sglang_callers/run.sh`` has put them."""

from __future__ import annotations

import os
from pathlib import Path

CALLERS = Path(__file__).parent.parent / "peers" / "sglang_callers"

#: As in run.sh: WORK, and its default.
WORK = Path(os.environ.get("WORK") or Path.home() / ".cache/mambapool/sglang-0.5.23")


def missing() -> str:
    """Why SGLang's code cannot be run here, empty if it can."""
    return "" if (WORK / "complete").exists() else f"no SGLang wheel in {WORK}: `make peers` gets it"


def environment(*folders: Path | str) -> dict[str, str]:
    """For a Python process that imports it: the same as run.sh's, with ``folders`` of ours on the path."""
    # What this process has of ours: an installed package needs no path, links of a developer do.
    ours = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = [WORK / "wheel", CALLERS / "stubs", CALLERS / "tests", *ours, WORK / "site"]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
        "SGL_ALIAS": "0",
    }
