"""What ``mambapool doctor`` finds: each says what it means and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

#: Works; works not as well as it could, or not for everything; will not work.
GOOD, NOTE, BAD = "good", "note", "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """``todo`` is empty where there is nothing to do."""

    what: str
    state: str
    found: str
    means: str
    todo: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def good(what: str, found: str, means: str) -> Finding:
    return Finding(what, GOOD, found, means)


def note(what: str, found: str, means: str, todo: str) -> Finding:
    return Finding(what, NOTE, found, means, todo)


def bad(what: str, found: str, means: str, todo: str) -> Finding:
    return Finding(what, BAD, found, means, todo)
