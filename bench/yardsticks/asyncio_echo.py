"""``asyncio_echo.py ENDPOINT REPLY_BYTES``: the echo on zmq.asyncio. It allocates nothing."""

from __future__ import annotations

import asyncio
import sys

import zmq
import zmq.asyncio


async def serve(endpoint: str, reply_bytes: int) -> None:
    router = zmq.asyncio.Context().socket(zmq.ROUTER)
    router.set_hwm(0)
    router.bind(endpoint)
    print("ready", flush=True)
    reply = bytes(reply_bytes)
    while True:
        identity, _request = await router.recv_multipart()
        await router.send_multipart([identity, reply])


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
