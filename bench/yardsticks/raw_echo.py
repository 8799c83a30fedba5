"""``raw_echo.py ENDPOINT REPLY_BYTES``: a ROUTER that answers every message, as fast as pyzmq can.

Two receives, two sends, on the compiled base class, so that no Python of pyzmq's own is in the way. Replies have the
size of the replies that are compared with it.
"""

from __future__ import annotations

import sys

import zmq
from zmq.backend import Socket


def main() -> None:
    endpoint, reply_bytes = sys.argv[1], int(sys.argv[2])
    router: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
    router.set_hwm(0)
    router.bind(endpoint)
    print("ready", flush=True)
    receive, send, more = Socket.recv, Socket.send, int(zmq.SNDMORE)
    reply = bytes(reply_bytes)
    while True:
        identity = receive(router)
        receive(router)
        send(router, identity, more)
        send(router, reply)


if __name__ == "__main__":
    main()
