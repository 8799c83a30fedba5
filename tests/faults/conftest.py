"""One daemon for all faults that a daemon has to survive, and children to be killed."""

from __future__ import annotations

from leased_clients import lasting_daemon, new_pool  # noqa: F401  (fixtures)
from processes import children, zygote  # noqa: F401  (fixtures)
