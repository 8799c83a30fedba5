"""Child processes for the tests of whole systems."""

from __future__ import annotations

from processes import children, zygote  # noqa: F401  (fixtures)
