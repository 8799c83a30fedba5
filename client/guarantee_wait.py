"""Why a session with a guarantee has not begun in time: its slots may be missing, and not the allocator."""

from __future__ import annotations

from mambapool.client.operators import ask_status
from mambapool.pool.errors import AllocatorUnavailable, MambaPoolError
from mambapool.pool.runtime_dir import RuntimeDir

_ASK_S = 0.5


def missing_slots(directory: RuntimeDir, pool: str, guarantee: int, timeout: float) -> AllocatorUnavailable | None:
    """What a client that gave up after ``timeout`` seconds waited for; None: nobody answers, or it is none of this."""
    try:
        pools = ask_status(directory, _ASK_S)["pools"]
        (status,) = [known for known in pools if known["name"] == pool]
    except (MambaPoolError, ValueError):
        return None
    if status["free"] >= guarantee and not status["waiting"]:
        return None
    used = [(h["name"], h["session"], h["held"] + h["windows"] + h["offered"]) for h in status["holders"]]
    have = ", ".join(f"{name} (session {number}) {slots}" for name, number, slots in used if slots) or "nobody"
    return AllocatorUnavailable(
        f"a guarantee of {guarantee} was not granted within {timeout:g} s: {status['free']} of {status['slots']} slots "
        f"of pool {pool} are free, {status['waiting']} are waited for; who has slots: {have}"
    )
