"""Simulated GPUs, and daemons whose states live on one."""

from __future__ import annotations

from gpu_pools import _shared_daemon, gpu_pool, gpu_pools  # noqa: F401  (fixtures)
from simulated_gpu import gpu_zygote, machine  # noqa: F401  (fixtures)
