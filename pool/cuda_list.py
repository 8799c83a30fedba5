"""``python -m mambapool.pool.cuda_list``: driver and devices as this process sees them, one line of JSON.

For ``mambapool doctor``, whose own process calls nothing of CUDA: a driver may hang, or end its process.
``{"version", "has_context_events", "devices": [text, …], "visible"}``, or
``{"error", "todo"}``; ``todo`` is null where the error says all.
"""

from __future__ import annotations

import json

from mambapool.pool import cuda
from mambapool.pool.errors import CudaError


def main() -> None:
    try:
        said = _seen()
    except CudaError as error:
        said = {"error": str(error), "todo": cuda.INSTALL if "cuda-bindings" in str(error) else None}
    print(json.dumps(said))  # noqa: T201  to the doctor


def _seen() -> dict[str, object]:
    devices = cuda.visible_devices()
    version = cuda.driver_version()
    return {
        "version": version,
        "has_context_events": version >= cuda.CONTEXT_EVENTS_VERSION,
        "devices": [str(device) for device in devices],
        "visible": cuda.visible_text(devices),
    }


if __name__ == "__main__":
    main()
