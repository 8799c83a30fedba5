"""How waiting requests get their slots: all of a request's slots, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from mambapool.client.replay.request import Request
from mambapool.client.replay.slot_calls import SlotCalls


@dataclass(slots=True)
class Holding:
    """The slots of one request, each an int64 tensor of one element: its state's, and its tracks'."""

    request: Request
    slot: torch.Tensor
    tracks: list[torch.Tensor] = field(default_factory=list)

    @property
    def slots(self) -> list[torch.Tensor]:
        return [self.slot, *self.tracks]


def admit(calls: SlotCalls, waiting: Sequence[Request], track: int) -> list[Holding]:
    """Serve the first of ``waiting`` that get one slot and ``track`` more; those from the first that does
    not get all on hold nothing afterwards, so nobody is overtaken.

    The states' slots come from one window over all of ``waiting``, the tracks' slots are taken singly
    after it, as an engine does: SGLang prefetches for the requests that it schedules, and its track slots
    come when a request's prefix is matched.
    """
    holdings = _open_holdings(calls, waiting)
    served = 0
    while served < len(holdings) and _take_tracks(calls, holdings[served], track):
        served += 1
    calls.give_back([slot for holding in holdings[served:] for slot in holding.slots])
    return holdings[:served]


def _open_holdings(calls: SlotCalls, waiting: Sequence[Request]) -> list[Holding]:
    holdings = []
    calls.open_window(len(waiting))
    for request in waiting:
        slot = calls.take()
        if slot is None:
            break
        holdings.append(Holding(request, slot))
    calls.close_window()
    return holdings


def _take_tracks(calls: SlotCalls, holding: Holding, track: int) -> bool:
    while len(holding.tracks) < track:
        slot = calls.take()
        if slot is None:
            return False
        holding.tracks.append(slot)
    return True
