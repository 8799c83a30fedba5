"""Simulated GPUs, and daemons whose states live on one."""

from __future__ import annotations

from simulated_gpu import gpu_zygote, machine  # noqa: F401  (fixtures)
