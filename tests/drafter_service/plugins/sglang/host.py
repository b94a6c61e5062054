"""SGLang's Python classes on a machine without a GPU: modules that cannot be imported there are replaced."""

import contextlib
import importlib.machinery
import io
import sys
import warnings
from importlib.util import find_spec
from types import ModuleType
from unittest.mock import MagicMock

import pytest

KERNELS = ("flashinfer", "sgl_kernel", "torch_memory_saver", "torchcodec", "torchvision")
"""Packages with compiled CUDA code that the host imports."""


class Replacement(ModuleType):
    """A module with any attribute, of which nothing can be used."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class ReplacementFinder:
    """Finds the modules of `KERNELS`."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in KERNELS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Replacement(spec.name)

    def exec_module(self, module):
        pass


def import_sglang():
    """Import the host's worker for NGRAM and what it needs; skip the test where the host is missing."""
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed; make hosts-conformance installs it")
    import transformers  # noqa: F401  It must come first, so that it does not see the replacements.
    from transformers import PreTrainedModel  # noqa: F401

    finder = ReplacementFinder()
    sys.meta_path.insert(0, finder)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            from sglang.srt.speculative import ngram_worker  # noqa: F401
    except ImportError as problem:
        pytest.skip(f"SGLang cannot be imported here: {problem}")
    finally:
        sys.meta_path.remove(finder)
