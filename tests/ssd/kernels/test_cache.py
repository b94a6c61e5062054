"""The cache of compiled kernels: which edits compile them again, shared folders, and folders that cannot be written."""

import importlib
import os
import runpy
import subprocess
import sys

import pytest
from numba import config, njit
from numba.core.caching import _CacheLocator

from ssd.errors import UserError
from ssd.kernels import jit
from ssd.kernels.jit import Float, Int, kernel

MODULES = {
    "__init__": "",
    "other": """
from typing import NamedTuple

import numpy as np

from ssd.kernels.jit import inline, outline

STEP = 1
UNUSED = 1
TABLE = np.array([10, 20])

class Pair(NamedTuple):
    first: int
    second: float

@inline
def small(number):
    return number + AFTER

@outline
def large(number):
    return small(number) * 2

AFTER = 0
""",
    "kernels": """
from package_with_kernels.other import STEP, TABLE, UNUSED, Pair, large
from ssd.kernels.jit import Float, Int, fields_of, kernel

# A comment.

@kernel(Int, returns=Int)
def another(number):
    return number

@kernel(Int, fields_of(Pair, Int, Float), returns=Int)
def sum_up(number, pair):
    "Return a number."
    return 10_000 * STEP + 1000 * int(pair.first) + large(number) + TABLE[number]

@kernel(Int, returns=Int)
def result_for(number):
    return sum_up(number, Pair(5, 6.0))
""",
}
PROGRAM = """
import sys
import package_with_kernels.other
print("imported", flush=True)
sys.stdin.read()
from package_with_kernels.kernels import result_for, sum_up
print(result_for(1), sum_up.stats.cache_hits.total(), sum_up.stats.cache_path)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package with kernels, which are cached beside its modules."""
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python takes a module edited within a second as unchanged.
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "package_with_kernels"
    folder.mkdir()
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def edit(package, module, old, new):
    path = package / f"{module}.py"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def run(package):
    """Import the package anew; return the result of its kernels, and whether `sum_up` was loaded from the cache."""
    for name in [name for name in sys.modules if name.startswith(package.name)]:
        del sys.modules[name]
    kernels = importlib.import_module(f"{package.name}.kernels")
    return kernels.result_for(1), bool(kernels.sum_up.stats.cache_hits)


EDITS = [
    ("other", "STEP = 1", "STEP = 2", 25_022),
    ("other", "[10, 20]", "[10, 21]", 15_023),
    ("other", "    first: int\n    second: float", "    second: float\n    first: int", 16_022),
    ("other", "number + AFTER", "number - AFTER - 1", 15_020),
    ("other", "AFTER = 0", "AFTER = 1", 15_024),
    ("other", "* 2", "* 3", 15_023),
    ("other", "@outline\ndef large", "@inline\ndef large", 15_022),
    ("kernels", "10_000", "20_000", 25_022),
]
"""Edits of what a kernel uses, and its result after them."""
OTHER_EDITS = [
    ("other", "UNUSED = 1", "UNUSED = 2"),
    ("kernels", "# A comment.", "# A comment\n# of two lines."),
    ("kernels", "Return a number.", "Return the sum."),
    ("kernels", "return number\n", "return -number\n"),
]


def test_a_kernel_is_compiled_again_after_a_change_of_what_it_uses_and_of_nothing_else(package):
    assert run(package) == (15_022, False)
    for module, old, new, result in EDITS:
        edit(package, module, old, new)
        assert run(package) == (result, False), new
        edit(package, module, new, old)
    for edits in OTHER_EDITS:
        edit(package, *edits)
        assert run(package) == (15_022, True), edits


def test_a_kernel_is_compiled_again_after_what_it_uses_has_moved(package):
    """Compiled functions import the modules of those that they call, and their entries those of their types."""
    assert run(package) == (15_022, False)
    pair = "class Pair(NamedTuple):\n    first: int\n    second: float\n"
    (package / "pairs.py").write_text(f"from typing import NamedTuple\n\n{pair}")
    edit(package, "other", pair, "")
    edit(package, "kernels", "UNUSED, Pair, large", "UNUSED, large\nfrom package_with_kernels.pairs import Pair")
    assert run(package) == (15_022, False)
    (package / "other.py").rename(package / "moved.py")
    edit(package, "kernels", "package_with_kernels.other", "package_with_kernels.moved")
    assert run(package) == (15_022, False)


def test_a_kernel_is_compiled_again_after_its_module_was_renamed(package):
    (package / "former.py").write_text(MODULES["kernels"])
    # In this process numba would find the environments of these kernels in its memory.
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CACHE_DIR": ""}
    command = [sys.executable, "-c", f"import {package.name}.former"]
    subprocess.run(command, env={**os.environ, **environment}, check=True)
    assert any(package.glob("__pycache__/sum_up*"))
    (package / "former.py").unlink()
    assert run(package) == (15_022, False)
    assert run(package) == (15_022, True)


def test_processes_with_different_versions_share_a_folder(package, tmp_path):
    shared = tmp_path / "shared"
    environment = {
        "NUMBA_CACHE_DIR": str(shared),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def start():
        arguments = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", PROGRAM], env={**os.environ, **environment}, **arguments)

    def finish(process):
        result, hits, folder = process.communicate(timeout=60)[0].split()[-3:]
        assert folder.startswith(str(shared))
        return int(result), hits == "1"

    with start() as old:
        assert old.stdout.readline() == "imported\n"
        edit(package, "other", "STEP = 1", "STEP = 2")
        with start() as new:
            assert finish(new) == (25_022, False)
        assert finish(old) == (15_022, False)
    with start() as new:
        assert finish(new) == (25_022, True)


def test_a_kernel_that_reads_a_value_of_unknown_kind_is_refused(package):
    text = (package / "other.py").read_text()
    for value in ("[1, 2]", "object()", "list", "jit", "lambda number: number"):
        (package / "other.py").write_text(text.replace("AFTER = 0", f"from ssd.kernels import jit\nAFTER = {value}"))
        with pytest.raises(TypeError, match=r"package_with_kernels.other.small uses .*, which is neither a constant"):
            run(package)


def test_kernels_of_a_cache_that_cannot_be_written_are_used(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    times = []
    monkeypatch.setattr(jit, "log_compilation", times.append)
    module = tmp_path / "module_with_kernels.py"
    module.write_text("def add(one, other):\n    return one + other\n")
    function = runpy.run_path(str(module))["add"]
    assert kernel(Int, Int, returns=Int)(function).stats.cache_misses
    monkeypatch.setattr(_CacheLocator, "ensure_cache_path", refuse)
    add = kernel(Int, Int, returns=Int)(function)
    assert add.stats.cache_hits
    assert add(1, 2) == 3
    assert len(times) == 1  # that of the kernel which was compiled
    with pytest.raises(UserError, match="set the environment variable NUMBA_CACHE_DIR to a folder"):
        kernel(Float, Float, returns=Float)(function)
    with pytest.raises(RuntimeError, match="no locator"):  # Other functions are not affected.
        njit(cache=True)(function)
