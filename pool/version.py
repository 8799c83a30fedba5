"""The version, for the package's metadata and for processes that have no time to look it up there."""

from __future__ import annotations

VERSION = "0.1.0"
