#!/bin/sh
# Everything on one GPU, in a few minutes, in an image that has torch. Its results belong into docs/gpu.md.
#   tests/gpu/run.sh [FOLDER]     FOLDER has wheels of what the image lacks (pyzmq, cuda-bindings, pytest …)
# Make that folder where there is an index: pip download -d FOLDER pyzmq msgpack click rich cuda-bindings \
#   pytest pytest-timeout hypothesis setuptools wheel
set -eu
cd "$(dirname "$0")/../.."
environment=$(mktemp -d)/venv
python3 -m venv --system-site-packages "$environment"
from=""
if [ $# -gt 0 ]; then from="--no-index --find-links $1"; fi
# shellcheck disable=SC2086
"$environment/bin/pip" install --quiet $from setuptools wheel pyzmq msgpack click rich cuda-bindings \
    pytest pytest-timeout hypothesis
# shellcheck disable=SC2086
"$environment/bin/pip" install --quiet $from --no-deps --no-build-isolation .
nvidia-smi -L || true
"$environment/bin/python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
"$environment/bin/mambapool" doctor --device cuda || true
exec "$environment/bin/python" -m pytest tests/gpu -m gpu -rs -s --durations=0
