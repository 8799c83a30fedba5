"""A machine with simulated GPUs: the driver, built once, and processes that load it (``tests/sim_cuda``)."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from processes import Child, Children
from zygote import NO_TEARDOWN, Zygote

_SIM = Path(__file__).parent.parent / "sim_cuda"
_BUILD = Path(__file__).parent.parent.parent / "build" / "sim_cuda"

#: What the scripts would import one by one; nothing of it loads the driver before it is called.
_PRELOADED = (
    "cuda.bindings.driver",
    "mambapool.client.fenced_allocator",
    "mambapool.client.fenced_guaranteed",
    "mambapool.client.gpu",
    "mambapool.client.lingering",
    "mambapool.client.replay.worker_process",
    "mambapool.client.transfers",
    "mambapool.pool.cuda_states",
    "mambapool.pool.keeper",
    "mambapool.service.cli",
)

_COMMAND = """
from mambapool.service.cli import main
main()
"""

_FLAGS = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Wno-unused-result", "-fvisibility=hidden", "-fPIC"]


def why_not() -> str | None:
    """Why tests cannot have simulated GPUs here."""
    if shutil.which("gcc") is None:
        return "needs gcc, which builds the simulated CUDA driver"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "needs cuda-bindings: pip install 'mambapool[cuda]'"
    return None


def _built() -> Path:
    """The folder that holds ``libcuda.so.1``; made anew when its sources have changed."""
    sources = sorted((_SIM / "driver").glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    folder = _BUILD / digest
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{os.getpid()}"
        files = [str(source) for source in sources if source.suffix == ".c"]
        command = [
            "gcc",
            *_FLAGS,
            "-shared",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            str(draft),
            *files,
            "-lpthread",
            "-ldl",
        ]
        subprocess.run(command, check=True)
        draft.rename(library)  # other test processes build it too
    return folder


def library_environment() -> dict[str, str]:
    """What a process needs to load the simulated driver, besides a machine of its own."""
    paths = [str(_SIM / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"LD_LIBRARY_PATH": str(_built()), "PYTHONPATH": os.pathsep.join(paths)}


@dataclass
class SimulatedMachine:
    """Two GPUs of 1 GiB, unless ``settings`` say otherwise; ``README.md`` of ``tests/sim_cuda`` has them all."""

    dir: Path
    zygote: Zygote
    children: Children = field(init=False)

    def __post_init__(self) -> None:
        self.children = Children(self.zygote)

    def environment(self, **settings: str) -> dict[str, str]:
        """Of a process on this machine that is started from nothing."""
        return {**library_environment(), "SIM_CUDA_DIR": str(self.dir), **settings}

    def start(self, source: str, *arguments: object, **settings: str) -> Child:
        """A script, forked from a process that has imported torch already."""
        return self.children.start(source, *arguments, SIM_CUDA_DIR=str(self.dir), **settings)

    def command(self, *arguments: object, **settings: str) -> Child:
        """``mambapool …``, forked likewise."""
        return self.start(_COMMAND, *arguments, **settings)

    def run(self, source: str, *arguments: object, **settings: str) -> list[str]:
        """A script, to its end, which has to be status 0; the lines of its stdout."""
        return self.start(source, *arguments, **settings).rest()


@pytest.fixture(scope="session")
def gpu_zygote() -> Iterator[Zygote]:
    """As ``zygote``, with the simulated driver in place."""
    if reason := why_not():
        pytest.skip(reason)
    zygote = Zygote(*_PRELOADED, environment={**library_environment(), NO_TEARDOWN: "1"})
    yield zygote
    zygote.close()


@pytest.fixture
def machine(gpu_zygote: Zygote) -> Iterator[SimulatedMachine]:
    """A machine with simulated GPUs, of the test's own."""
    directory = Path(tempfile.mkdtemp(prefix="mambapool-gpu-"))
    simulated = SimulatedMachine(directory, gpu_zygote)
    yield simulated
    simulated.children.close()
    shutil.rmtree(directory)
