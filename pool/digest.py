"""BLAKE2b, without what the standard library's usual way to it costs.

``hashlib`` loads OpenSSL, 3.6 MB that an allocator process does not need for two digests at its start.
"""

from __future__ import annotations

try:
    from _blake2 import blake2b  # the module behind hashlib.blake2b
except ImportError:  # another Python implementation
    from hashlib import blake2b


def digest16(data: bytes) -> bytes:
    """16 bytes that are equal exactly when ``data`` is."""
    return blake2b(data, digest_size=16).digest()
