"""``python -m mambapool.pool.cuda_probe``: whether memory of a GPU can be shared between two processes here.

As ``export`` it says a packed descriptor in hex and, after a line of input, whether what the importer has written is
there. As ``import`` it reads the descriptor, opens the memory, and writes. For ``mambapool doctor``, which gives up on
either.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from mambapool.pool.cuda import call, primary_context, visible_devices
from mambapool.pool.cuda_attach import open_shard
from mambapool.pool.cuda_block import CudaBlock
from mambapool.pool.descriptor import UUID_BYTES, ShardDescriptor, unpack
from mambapool.pool.errors import MambaPoolError
from mambapool.pool.layout import Geometry, TensorSpec

WRITTEN = 0x5A
_STATE = Geometry((TensorSpec("probe", "float32", 1, (64,)),))


def main(role: str, ordinal: int) -> int:
    try:
        _export(ordinal) if role == "export" else _import()
    except MambaPoolError as error:
        print(f"error: {error}", flush=True)  # noqa: T201  to the doctor
        return 1
    return 0


def _export(ordinal: int) -> None:
    descriptor = ShardDescriptor("probe", os.urandom(UUID_BYTES), 0, 1, 1, _STATE, os.getpid())
    block = CudaBlock("the probe", descriptor.size_bytes, ordinal)
    print(replace(descriptor, cuda=block.export).pack().hex(), flush=True)  # noqa: T201
    sys.stdin.readline()
    data = bytearray(1)
    with primary_context(block.device).current():
        call("cuMemcpyDtoH", data, block.address, 1)
    print("same" if data[0] == WRITTEN else "other", flush=True)  # noqa: T201


def _import() -> None:
    descriptor = unpack(bytes.fromhex(sys.stdin.readline()))
    memory = open_shard(descriptor)
    with primary_context(visible_devices()[memory.ordinal]).current():
        call("cuMemcpyHtoD", memory.address, bytes([WRITTEN]), 1)
        call("cuCtxSynchronize")  # the copy returns when it is staged
    print("written", flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
