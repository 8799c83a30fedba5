"""A Mamba-2 model of Hugging Face whose states live in pool slots: what examples/mamba2.py runs in each process.

``transformers`` keeps a cache of one conv and one recurrent state per layer, and changes both in place. Here
both are a row of the pool's tensors: the model itself reads and writes the slot, nothing is copied in or out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import torch
from transformers.cache_utils import DynamicCache, LinearAttentionLayer
from transformers.models.mamba2 import Mamba2Config, Mamba2ForCausalLM

from mambapool.client import Worker, connect

torch.set_num_threads(1)  # several of these processes share a machine, and the model is tiny


def tiny_model() -> Mamba2ForCausalLM:
    """The same random weights in every process; nothing is downloaded."""
    torch.manual_seed(20)
    config = Mamba2Config(
        vocab_size=256, hidden_size=32, expand=2, num_heads=4, head_dim=16, state_size=16, n_groups=1,
        num_hidden_layers=3, conv_kernel=4, chunk_size=8,
    )  # fmt: skip
    return Mamba2ForCausalLM(config).eval()


def state_flags(config: Mamba2Config) -> list[str]:
    """``--state`` of ``mambapool serve``; transformers keeps as many inputs as the convolution is wide."""
    channels = config.expand * config.hidden_size + 2 * config.n_groups * config.state_size
    conv = (config.num_hidden_layers, channels, config.conv_kernel)
    temporal = (config.num_hidden_layers, config.num_heads, config.head_dim, config.state_size)
    return [
        f"conv=float32:{'x'.join(map(str, conv))}",
        f"temporal=float32:{'x'.join(map(str, temporal))}",
    ]


class SlotLayer(LinearAttentionLayer):  # type: ignore[misc]  # transformers is optional
    """The state of one layer in one slot: rows ``[1, …]`` of the pool instead of tensors of its own."""

    def __init__(self, conv: torch.Tensor, temporal: torch.Tensor, *, filled: bool) -> None:
        super().__init__()
        self._rows = conv, temporal
        if filled:
            self.lazy_initialization(conv_states=conv, recurrent_states=temporal)
            self.has_previous_state[0] = True

    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """Where transformers would make tensors of zeros."""
        super().lazy_initialization(conv_states, recurrent_states, state_idx, conv_kernel_size)
        if conv_states is not None:
            self.conv_states[0] = self._rows[0]
        if recurrent_states is not None:
            self.recurrent_states[0] = self._rows[1]


class Engine:
    """One process: the model, and a session with the pool."""

    def __init__(self, directory: str) -> None:
        self.model = tiny_model()
        self.worker: Worker = connect(directory, name=f"mamba2-{os.getpid()}")

    def session(self) -> int:
        return self.worker.session

    def prefill(self, tokens: list[int]) -> tuple[int, int]:
        """A new slot with the state after ``tokens``, and the first token that follows."""
        slot = self.worker.allocator.alloc(1, timeout=5.0)
        assert slot is not None, "the pool is full"
        (first,) = self._generate(self._cache(int(slot), filled=False), tokens, 1)
        return int(slot), first

    def decode(self, slot: int, tokens: list[int], count: int) -> list[int]:
        """``count`` tokens that follow the slot's state and ``tokens``; the state goes along."""
        return self._generate(self._cache(slot, filled=True), tokens, count)

    def alone(self, turns: list[list[int]], count: int) -> list[int]:
        """What one process gives, without a pool: feed the turns, then generate."""
        cache = DynamicCache(config=self.model.config)
        for turn in turns[:-1]:
            self._generate(cache, turn, 1)
        return self._generate(cache, turns[-1], count)

    def fork(self, slot: int, count: int) -> list[int]:
        """New slots with the same state."""
        copies = self.worker.allocator.alloc(count, timeout=5.0)
        assert copies is not None, "the pool is full"
        self.worker.pool.copy([slot] * count, copies)
        forked: list[int] = copies.tolist()
        return forked

    def give(self, slot: int, to: int) -> None:
        self.worker.transfer(torch.tensor([slot]), to=to)

    def take(self) -> int:
        slots = self.worker.accept(timeout=10.0)
        assert slots is not None, "nobody gave anything"
        return int(slots)

    def free(self, slot: int) -> None:
        self.worker.allocator.free(torch.tensor([slot]))

    def _cache(self, slot: int, *, filled: bool) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        conv, temporal = (self.worker.states[name][:, slot : slot + 1] for name in ("conv", "temporal"))
        cache.layers = [SlotLayer(*rows, filled=filled) for rows in zip(conv, temporal, strict=True)]
        return cache

    @torch.inference_mode()
    def _generate(self, cache: DynamicCache, tokens: Sequence[int], count: int) -> list[int]:
        generated: list[int] = []
        while len(generated) < count:
            logits = self.model(torch.tensor([list(tokens)]), cache=cache, use_cache=True).logits
            tokens = [int(logits[0, -1].argmax())]
            generated += tokens
        return generated


def obey(directory: str) -> None:
    """Be one engine: calls come as lines ``[name, arguments…]`` on stdin, answers go as lines to stdout."""
    engine = Engine(directory)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(engine, name)(*arguments)), flush=True)


if __name__ == "__main__":
    obey(sys.argv[1])
