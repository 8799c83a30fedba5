"""One request of a trace."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    ``index`` counts from 0 in order of arrival, ``arrival_ms`` from the start of the trace. Lengths are in
    tokens. ``hash_ids`` stand for the blocks of the prompt: equal leading ids are an equal prefix.
    """

    index: int
    arrival_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()

    @property
    def steps(self) -> int:
        """How many steps the request runs: one per token that it puts out, and at least one."""
        return max(1, self.output_length)
