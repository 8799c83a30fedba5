"""How the figures of ``bench/`` are measured: pinned, interleaved, as ratios."""
