"""The faults that a replay has found."""

from __future__ import annotations

from mambapool.pool.errors import InvalidSlots

#: Lines kept per scheduler: one fault in the allocator can spoil every request after it.
MOST_LINES = 20


class Findings:
    """Counts faults, each request once and each refused call once, and keeps the first lines about them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._requests: set[int] = set()
        self._refusals = 0

    def __len__(self) -> int:
        return len(self._requests) + self._refusals

    def spoiled(self, request: int, line: str) -> None:
        """A state of a request is not what it must be."""
        if request not in self._requests:
            self._requests.add(request)
            self._keep(line)

    def refused(self, refusal: InvalidSlots) -> None:
        """The allocator did not take back what it had handed out."""
        self._refusals += 1
        self._keep(f"{type(refusal).__name__}: {refusal}")

    def _keep(self, line: str) -> None:
        if len(self.lines) < MOST_LINES:
            self.lines.append(line)
