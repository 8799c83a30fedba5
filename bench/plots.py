"""``python bench/plots.py``: the two pictures of the README, into ``bench/plots/``. Needs matplotlib (``[plot]``).

Both show a slot's share of a whole cycle: begin(B), B × alloc(1), B × free, end; ours through client and daemon, and
SGLang's algorithm in process. Medians of interleaved blocks; absolute times are those of one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cycle import cycles, title
from measuring.blocks import interleave
from measuring.figures import Effort, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).parent / "plots"

POOL_SIZES = tuple(2**power for power in range(10, 21, 2))
GROUP_SIZES = tuple(2**power for power in range(10))
COUNT = 64
SIZE = 4096

COLOURS = {"mambapool": "#0072B2", "in-process": "#D55E00"}
LABELS = {"mambapool": "mambapool, by message", "in-process": "SGLang's list, in process"}

EFFORT = Effort(runs=1, blocks=12, calls=3)  # a cycle of 64 in a list of a million takes a tenth of a second


def main() -> None:
    import torch

    torch.set_num_threads(
        1
    )  # long lists are copied by several threads, which only get in each other's way on one core
    FOLDER.mkdir(exist_ok=True)
    by_pool_size = {size: per_slot_us(COUNT, size) for size in POOL_SIZES}
    by_group_size = {count: per_slot_us(count, SIZE) for count in GROUP_SIZES}
    draw("pool-size.png", by_pool_size, f"slots of the pool (windows of {COUNT})")
    draw("group-size.png", by_group_size, f"slots of a window (pool of {SIZE:,})")


def per_slot_us(count: int, size: int) -> dict[str, float]:
    """Microseconds per slot of a cycle, of each side."""
    with cycles((size,), (count,)) as contenders:
        samples = interleave(contenders, EFFORT)
    return {whose: samples.percentile(title(whose, count, size), 50) / 1e3 / count for whose in COLOURS}


def draw(name: str, values: dict[int, dict[str, float]], axis: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    for whose, colour in COLOURS.items():
        axes.plot(list(values), [each[whose] for each in values.values()], "o-", color=colour, label=LABELS[whose])
    _scale(axes, list(values))
    axes.set_xlabel(axis)
    axes.set_ylabel("µs per slot")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FOLDER / name, dpi=130)
    say(f"{FOLDER / name}: " + ", ".join(f"{at}: {_text(each)}" for at, each in values.items()))


def _scale(axes: Axes, places: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(places, [f"{place // 1024}K" if place >= 1024 else str(place) for place in places])


def _text(each: dict[str, float]) -> str:
    return " / ".join(f"{value:.2f}" for value in each.values())


if __name__ == "__main__":
    main()
