"""The running requests of one scheduler, their states advanced together and checked against private ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mambapool.client.replay.admission import Holding
from mambapool.client.replay.checks import Check, verify
from mambapool.client.replay.device_states import map_states
from mambapool.client.replay.findings import Findings
from mambapool.client.replay.inputs import Inputs
from mambapool.client.replay.pool_api import Worker
from mambapool.client.replay.private_states import PrivateStates, SlotWords
from mambapool.client.replay.recurrence import FIRST_TRACK_STEP, drive

#: Steps between two copies of a state into one of its request's track slots.
TRACK_EVERY = 64


@dataclass(slots=True)
class _Running:
    """A running request: ``tracked`` is what its track slots must hold, ``turn`` the one to copy to next."""

    holding: Holding
    tracked: list[SlotWords]
    turn: int = 0

    def track_check(self, track: int, step: int) -> Check:
        slot = int(self.holding.tracks[track])
        return Check(self.holding.request.index, step, slot, f"track {track}", self.tracked[track])


class Batch:
    """Requests that run, in the order in which they started.

    All slots of a request are checked after its last step. Before that only at a copy: the track slot,
    because the copy would wipe out a foreign write, and the state, so that a fault is reported where it is
    and not in a copy. A state needs no other check, as no foreign write fades in it
    (:mod:`~mambapool.client.replay.recurrence`).
    """

    def __init__(self, worker: Worker, findings: Findings) -> None:
        self._pool = worker.pool
        self._mapped = map_states(worker.states)
        self._private = PrivateStates(self._mapped.tensors)
        self._inputs = Inputs(self._mapped.tensors)
        self._findings = findings
        # One entry per running request, all in the same order, which is that of the private rows too.
        self._running: list[_Running] = []
        self._slots = np.empty(0, np.int64)
        self._requests = np.empty(0, np.uint32)
        self._steps = np.empty(0, np.uint32)
        self._ends = np.empty(0, np.uint32)
        self._steps_to_event = 0

    def __len__(self) -> int:
        return len(self._running)

    def start(self, holdings: Sequence[Holding]) -> None:
        """Give the requests' states and track slots what they hold before the first step."""
        if not holdings:
            return
        requests = np.array([holding.request.index for holding in holdings], np.uint32)
        steps = np.zeros_like(requests)
        inputs = self._inputs.of(drive(requests, steps))
        self._mapped.start(_ids([holding.slot for holding in holdings]), inputs)
        self._private.start(inputs)
        self._running += [_Running(holding, self._start_tracks(holding)) for holding in holdings]
        self._requests = np.concatenate((self._requests, requests))
        self._steps = np.concatenate((self._steps, steps))
        ends = np.array([holding.request.steps for holding in holdings], np.uint32)
        self._ends = np.concatenate((self._ends, ends))
        self._plan()

    def step(self) -> list[Holding]:
        """One step of every running request (there must be one); returns the finished ones' holdings."""
        self._steps += np.uint32(1)
        inputs = self._inputs.of(drive(self._requests, self._steps))
        self._mapped.advance(self._slots, inputs)
        self._private.advance(inputs)
        self._steps_to_event -= 1
        if self._steps_to_event:
            return []
        self._copy_into_tracks()
        finished = self._finish()
        self._plan()
        return finished

    def _plan(self) -> None:
        """Gather the slots, and count the steps to the next copy or end: others need no second look."""
        if self._running:
            self._slots = _ids([running.holding.slot for running in self._running])
            to_end = int((self._ends - self._steps).min())
            to_copy = TRACK_EVERY - int((self._steps % TRACK_EVERY).max())
            self._steps_to_event = min(to_end, to_copy)

    def _start_tracks(self, holding: Holding) -> list[SlotWords]:
        if not holding.tracks:
            return []
        steps = np.uint32(FIRST_TRACK_STEP) - np.arange(len(holding.tracks), dtype=np.uint32)
        inputs = self._inputs.of(drive(np.full_like(steps, holding.request.index), steps))
        self._mapped.start(_ids(holding.tracks), inputs)
        return [list(words) for words in zip(*inputs, strict=True)]

    def _copy_into_tracks(self) -> None:
        for row in np.flatnonzero(self._steps % TRACK_EVERY == 0).tolist():
            running = self._running[row]
            if not running.tracked:
                continue
            # One at a time: if two requests were given the same track slot, one of them is to see it here.
            state, track = self._state_check(row), running.track_check(running.turn, int(self._steps[row]))
            verify(self._mapped, [state, track], self._findings)
            self._pool.copy(running.holding.slot, running.holding.tracks[running.turn])
            running.tracked[running.turn] = state.expected
            running.turn = (running.turn + 1) % len(running.tracked)

    def _state_check(self, row: int) -> Check:
        holding = self._running[row].holding
        step = int(self._steps[row])
        return Check(holding.request.index, step, int(holding.slot), "its state", self._private.row(row))

    def _finish(self) -> list[Holding]:
        stays = self._steps < self._ends
        finished = []
        checks = []
        for row in np.flatnonzero(~stays).tolist():
            running = self._running[row]
            checks.append(self._state_check(row))
            checks += [running.track_check(track, int(self._steps[row])) for track in range(len(running.tracked))]
            finished.append(running.holding)
        if finished:
            verify(self._mapped, checks, self._findings)
            self._drop(stays)
        return finished

    def _drop(self, stays: NDArray[np.bool_]) -> None:
        self._private.keep(stays)
        self._running = [running for running, stay in zip(self._running, stays, strict=True) if stay]
        self._requests = self._requests[stays]
        self._steps = self._steps[stays]
        self._ends = self._ends[stays]


def _ids(slots: Sequence[torch.Tensor]) -> NDArray[np.int64]:
    """The ids in slot tensors of one element each."""
    ids: NDArray[np.int64] = torch.cat(list(slots)).numpy()
    return ids
