"""Run by every Python of a test on the simulated driver: puts torch's part of it in place.

The build of torch that tests have knows no CUDA. ``mambapool.pool.cuda_tensors``, five functions that ask torch
about pointers to device memory, is all that is replaced, by ``simulated_tensors.py`` beside this file.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

_REPLACED = "mambapool.pool.cuda_tensors"


class _Finder:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _REPLACED:
            return None
        return importlib.util.spec_from_file_location(name, Path(__file__).with_name("simulated_tensors.py"))


sys.meta_path.insert(0, _Finder)
