"""Tests with other people's code: SGLang from its wheel, models of transformers. Skipped where those are not there."""

from __future__ import annotations

from leased_clients import lasting_daemon  # noqa: F401  (fixture)
from processes import children, zygote  # noqa: F401  (fixtures)

# Run by its own run.sh, in another environment: see run_callers.py.
collect_ignore = ["sglang_callers"]
