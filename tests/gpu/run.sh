#!/bin/sh
# Everything on one GPU, in a few minutes, in an image that has torch. Its results belong into docs/gpu.md.
#   tests/gpu/run.sh [FOLDER]     FOLDER has wheels of what the image lacks
# Make that folder where there is an index: pip download -d FOLDER '.[cuda,test]' 'setuptools>=77' wheel
# PYTHON is the one that has torch, python3 if nothing is said.
set -eu
python=${PYTHON:-python3}
wheels=${1:+$(realpath "$1")}
cd "$(dirname "$0")/../.."
torch=$("$python" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent.parent)')

# An environment of our own that sees the image's packages, also when its Python is that of an environment.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv --system-site-packages "$work/venv"
echo "$torch" > "$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
install() {
    "$work/venv/bin/pip" install --quiet --disable-pip-version-check \
        ${wheels:+--no-index} ${wheels:+"--find-links=$wheels"} "$@"
}
install 'setuptools>=77' wheel
# From a copy, so that nothing is built into the tree.
mkdir "$work/source"
cp -R LICENSE README.md pyproject.toml pool client service "$work/source"
install --no-build-isolation "$work/source[cuda,test]"
nvidia-smi -L || true
"$work/venv/bin/python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
"$work/venv/bin/mambapool" doctor --device cuda || true
# Whatever plugins the image has: only ours.
PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 "$work/venv/bin/python" -m pytest -p pytest_asyncio.plugin -p pytest_timeout \
    tests/gpu -m gpu -rs -s --durations=0
