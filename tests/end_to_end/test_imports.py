"""Imports go one way, and heavy ones happen only where they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import Daemon

import mambapool.client
import mambapool.pool
import mambapool.service

PACKAGES = {
    module.__name__.split(".")[1]: module for module in (mambapool.client, mambapool.pool, mambapool.service)
}

#: Who may import whom besides itself. The composition root alone may import the client.
ALLOWED = {"pool": set[str](), "client": {"pool"}, "service": {"pool"}}
COMPOSITION_ROOT = "service/cli.py"


def imports(path: Path) -> Iterator[str]:
    """The full names that a file imports when it runs, wherever in it."""
    tree = ast.parse(path.read_text())
    for_types = {id(node) for block in ast.walk(tree) if _is_for_types(block) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_for_types(node: ast.AST) -> bool:
    """``if TYPE_CHECKING:``, which imports nothing when it runs."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def sources(package: str) -> list[Path]:
    folder = Path(PACKAGES[package].__path__[0])
    found = sorted(folder.rglob("*.py"))
    assert found, f"no source in {folder}"
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_one_another_in_one_direction_only(package: str) -> None:
    folder = Path(PACKAGES[package].__path__[0])
    for path in sources(package):
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("mambapool.")} - {package}
        allowed = ALLOWED[package]
        if f"{package}/{path.relative_to(folder)}" == COMPOSITION_ROOT:
            allowed = allowed | {"client"}
        assert ours <= allowed, f"{path} imports {ours - allowed}"


def test_nothing_of_the_service_imports_torch_or_calls_cuda() -> None:
    """``mambapool doctor`` has children for that."""
    for path in sources("service"):
        found = {
            name
            for name in imports(path)
            if name.split(".")[0] in ("torch", "cuda") or name.startswith("mambapool.pool.cuda")
        }
        assert not found, f"{path} imports {found}"


@pytest.mark.parametrize("package", PACKAGES)
def test_pickle_and_its_relatives_are_imported_nowhere(package: str) -> None:
    for path in sources(package):
        found = {name.split(".")[0] for name in imports(path)} & {"pickle", "cPickle", "marshal", "shelve", "dill"}
        assert not found, f"{path} imports {found}"


def test_one_file_of_each_side_knows_the_socket() -> None:
    found = {
        f"{package}/{path.name}"
        for package in PACKAGES
        for path in sources(package)
        if any(name.split(".")[0] == "zmq" for name in imports(path))
    }
    assert found == {"client/dealer.py", "service/server.py"}


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT_TORCH = """
import sys
from importlib.abc import MetaPathFinder

class NoTorch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
from mambapool.client import connect, errors

assert issubclass(errors.DoubleFree, errors.InvalidSlots)
try:
    connect("/nowhere", timeout=0.1)
except ImportError as error:
    print(error)
"""


def test_without_torch_the_client_can_be_imported_and_connect_says_what_to_install() -> None:
    assert "pip install 'mambapool[worker]'" in run_python(WITHOUT_TORCH)


def test_importing_the_client_imports_neither_torch_nor_anything_of_the_command_line() -> None:
    heavy = ("torch", "rich", "click", "prometheus_client", "cuda", "mambapool.service")
    code = f"import sys, mambapool.client; print([name for name in {heavy} if name in sys.modules])"
    assert run_python(code) == "[]\n"


def test_an_allocator_at_work_has_mapped_neither_torch_nor_cuda(daemon: Daemon) -> None:
    worker = daemon.connect()
    worker.allocator.alloc_group_begin(8)
    assert worker.allocator.alloc(1) is not None
    worker.allocator.alloc_group_end()
    assert daemon.pool()["held"] == 1
    mapped = Path(f"/proc/{daemon.allocator_pid}/maps").read_text()
    assert "libzmq" in mapped, "not the process that was meant"
    assert not [word for word in ("torch", "libcuda", "libgomp", "mkl") if word in mapped]
