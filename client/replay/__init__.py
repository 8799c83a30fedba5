"""``mambapool replay``: schedulers over a public request trace, each step as an engine does it."""
