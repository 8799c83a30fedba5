"""A real Mamba-2 model whose states live in slots, over processes and a crash: the stories of examples/mamba2.py."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mamba2
import pytest
from daemons import Daemon, start_daemon, wait_until
from leased_clients import successor_of
from processes import Child, Children
from zygote import Zygote

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install '.[peers]'"
)

SLOTS = 8

_SCRIPT = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from mamba2_slots import obey
    obey(sys.argv[2])
"""

_STATES = """
    import json, sys
    sys.path.insert(0, sys.argv[1])
    from mamba2_slots import state_flags, tiny_model
    print(json.dumps(state_flags(tiny_model().config)))
"""

EXAMPLES = Path(mamba2.__file__).parent


@pytest.fixture(scope="module")
def models() -> Iterator[Children]:
    """Starts processes that have transformers already: importing it takes seconds."""
    zygote = Zygote("transformers.models.mamba2.modeling_mamba2")
    children = Children(zygote)
    yield children
    children.close()
    zygote.close()


@pytest.fixture(scope="module")
def daemon(models: Children) -> Iterator[Daemon]:
    (flags,) = models.run(_STATES, EXAMPLES)
    with tempfile.TemporaryDirectory(prefix="mambapool-") as folder:
        daemon = start_daemon(Path(folder, "run"), slots=SLOTS, states=tuple(json.loads(flags)))
        yield daemon
        daemon.close()


@pytest.fixture(scope="module")
def engines(models: Children, daemon: Daemon) -> list[mamba2.Ask]:
    """Four processes, each with the model and a session."""
    started = [models.start(_SCRIPT, EXAMPLES, daemon.dir, TRANSFORMERS_VERBOSITY="error") for _ in range(4)]
    return [functools.partial(ask, child) for child in started]


def ask(engine: Child, method: str, *arguments: Any) -> Any:
    engine.say(json.dumps([method, *arguments]))
    return json.loads(engine.hear())


@pytest.fixture(autouse=True)
def _nothing_is_left(daemon: Daemon) -> Iterator[None]:
    yield
    wait_until(lambda: daemon.pool()["free"] == SLOTS, "every slot is free again")
    daemon.check()


def test_decoding_in_another_process_gives_the_tokens_that_one_process_gives(engines: list[mamba2.Ask]) -> None:
    tokens, alone = mamba2.hand_over(engines[0], engines[1])
    assert tokens == alone
    assert len(set(tokens)) > 4, "a model that says the same all the time would hide a wrong state"


def test_the_same_with_the_allocator_killed_between_prefill_and_decode(
    engines: list[mamba2.Ask], daemon: Daemon
) -> None:
    pid = daemon.allocator_pid
    tokens, alone = mamba2.hand_over(engines[0], engines[1], lambda: os.kill(pid, signal.SIGKILL))
    assert tokens == alone
    assert successor_of(daemon, pid) != pid


def test_three_processes_continue_copies_of_one_state_each_in_its_own_way(engines: list[mamba2.Ask]) -> None:
    tokens, alone = mamba2.fork(engines[0], engines[1:])
    assert tokens == alone
    assert len({tuple(each) for each in tokens}) == 3


def test_a_state_that_was_forked_is_still_what_it_was(engines: list[mamba2.Ask]) -> None:
    engine = engines[0]
    slot, first = engine("prefill", mamba2.PROMPT)
    (copy,) = engine("fork", slot, 1)
    engine("decode", copy, mamba2.TURNS[0], 5)
    tokens = [first, *engine("decode", slot, [first], 7)]
    for each in (slot, copy):
        engine("free", each)
    assert tokens == engine("alone", [mamba2.PROMPT], 8)


def test_the_state_in_the_slot_is_what_the_tokens_come_from(engines: list[mamba2.Ask]) -> None:
    """Else the tests above would compare the weights with themselves."""
    engine = engines[0]
    slot, first = engine("prefill", mamba2.PROMPT)
    other, _ = engine("prefill", mamba2.PROMPT[::-1])
    right, wrong = (engine("decode", each, [first], 8) for each in (slot, other))
    for each in (slot, other):
        engine("free", each)
    assert right != wrong


def test_the_example_says_what_it_needs_where_transformers_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setitem(sys.modules, "mamba2_slots", None)
    assert mamba2.main() == 2
    assert "[worker,peers]" in capsys.readouterr().err
