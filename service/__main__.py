"""``python -m mambapool.service``: the same as ``mambapool``."""

from mambapool.service.cli import main

main()
