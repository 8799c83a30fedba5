"""``multipart_echo.py ENDPOINT REPLY_BYTES``: the same echo with ``recv_multipart`` and ``send_multipart``."""

from __future__ import annotations

import sys

import zmq


def main() -> None:
    endpoint, reply_bytes = sys.argv[1], int(sys.argv[2])
    router: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
    router.set_hwm(0)
    router.bind(endpoint)
    print("ready", flush=True)
    reply = bytes(reply_bytes)
    while True:
        identity, _request = router.recv_multipart()
        router.send_multipart([identity, reply])


if __name__ == "__main__":
    main()
