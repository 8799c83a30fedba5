"""What ``mambapool audit`` says: for people and for machines."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mambapool.pool.errors import UnknownPool
from mambapool.service.audit_checks import Violation, violations
from mambapool.service.audited import AuditedPool, Holding
from mambapool.service.ranges import ranges


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What was found in one pool."""

    name: str
    slots: int
    counts: dict[str, int]
    violations: list[Violation]
    holdings: list[Holding]


@dataclass(frozen=True, slots=True)
class Report:
    """What was found in all pools of a daemon, each of a moment of its own."""

    epoch: int
    pid: int
    pools: list[PoolReport]

    @property
    def ok(self) -> bool:
        return not any(pool.violations for pool in self.pools)

    def to_json(self) -> dict[str, Any]:
        """``holdings`` has an entry per slot, the longest held first; ``violations`` name the slots at fault."""
        return {
            "epoch": self.epoch,
            "pid": self.pid,
            "ok": self.ok,
            "pools": [
                {
                    "name": pool.name,
                    "slots": pool.slots,
                    **pool.counts,
                    "ok": not pool.violations,
                    "violations": [dataclasses.asdict(violation) for violation in pool.violations],
                    "holdings": [_holding_json(holding) for holding in pool.holdings],
                }
                for pool in self.pools
            ],
        }


def audit_all(status: dict[str, Any], ask: Callable[[str], dict[str, Any]], older_than_s: float) -> Report:
    """Check every pool that ``status`` names; ``ask(name)`` is its snapshot."""
    reports = []
    for name in [known["name"] for known in status["pools"]]:
        # One that a client made ends with it.
        with contextlib.suppress(UnknownPool):
            pool = AuditedPool(ask(name))
            found = violations(pool)
            reports.append(PoolReport(name, pool.slots, pool.counts(), found, pool.holdings(older_than_s)))
    return Report(status["epoch"], status["pid"], reports)


def _holding_json(holding: Holding) -> dict[str, Any]:
    entry = dataclasses.asdict(holding)
    if holding.age_s is not None:
        entry["age_s"] = round(holding.age_s, 3)
    return entry


def draw(report: Report) -> None:
    """For people: what is wrong, and a line per grant."""
    from rich.table import Column
    from rich.text import Text

    from mambapool.service.drawing import make_console, plain_table

    console = make_console()
    for pool in report.pools:
        counts = ", ".join(f"{count} {what}" for what, count in pool.counts.items() if count)
        verdict = "not as it has to be:" if pool.violations else "every slot is in exactly one state"
        console.print(f"pool {pool.name}, {pool.slots} slots ({counts}): {verdict}")
        for violation in pool.violations:
            slots = f"slots {ranges(violation.slots)}: " if violation.slots else ""
            console.print(Text.assemble(("✗", "red"), f" {slots}{violation.what}"))
    numbers = {name: Column(name, justify="right") for name in ("session", "pid", "slots", "age", "generation")}
    names = ("pool", "session", "name", "pid", "state", "kind", "slots", "age", "generation", "tag", "ids")
    table = plain_table(*(numbers.get(name, name) for name in names))
    for pool in report.pools:
        for grant in _grants(pool.holdings):
            first = grant[0]
            table.add_row(
                pool.name,
                str(first.session),
                first.name,
                str(first.pid),
                first.state,
                f"offered to {first.offered_to}" if first.offered_to else first.kind,
                str(len(grant)),
                _age(first),
                _generations(grant),
                first.tag or "",
                ranges(sorted(holding.slot for holding in grant)),
            )
    if table.row_count:
        console.print()
        console.print(table)


def _grants(holdings: Iterable[Holding]) -> Iterator[list[Holding]]:
    """What is held by one request and in one way, together."""

    def grant(holding: Holding) -> tuple[Any, ...]:
        age_s = holding.age_s or 0.0
        return -age_s, holding.session, holding.request, holding.kind, holding.offered_to or 0

    for _, together in itertools.groupby(sorted(holdings, key=grant), key=grant):
        yield list(together)


def _age(holding: Holding) -> str:
    """``12.5 s``, ``3 min``, ``2.4 h``; ``≥`` when it is older than the allocator."""
    age_s = holding.age_s
    if age_s is None:
        return "?"
    shown = (
        f"{age_s:.1f} s" if age_s < 120 else f"{age_s / 60:.0f} min" if age_s < 7200 else f"{age_s / 3600:.1f} h"
    )
    return f"≥ {shown}" if holding.at_least else shown


def _generations(grant: list[Holding]) -> str:
    low, high = (pick(holding.generation for holding in grant) for pick in (min, max))
    return str(low) if low == high else f"{low}-{high}"
