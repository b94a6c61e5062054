"""The implementations of verification that there are on this machine."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
from pathlib import Path

import pytest
import torch

from engine.executor.kernels import verify, verify_torch

COUNTER = itertools.count()

if not torch.cuda.is_available():
    # Then kernels are interpreted on the CPU, which Triton has to know before it is imported.
    os.environ["TRITON_INTERPRET"] = "1"


class Backend:
    """An implementation and the device of its tensors."""

    def __init__(self, module, device="cpu"):
        self.verify = module.verify
        self.module = module
        self.device = torch.device(device)
        self.cases = 15 if module.__name__.endswith("triton") else 100
        """How many to try: interpreting is slow."""


def triton_module():
    """The kernels."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from engine.executor.kernels import verify_triton

    return verify_triton


def interpreted_kernels(name):
    """The module of this name, whose kernels are interpreted."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the kernels run on this machine's GPU; nothing is interpreted")
    return importlib.import_module(f"engine.executor.kernels.{name}")


def interpreted():
    module = triton_module()
    if torch.cuda.is_available():
        pytest.skip("the kernels run on this machine's GPU; nothing is interpreted")
    return Backend(module)


def on_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return Backend(verify, "cuda")


def torch_on_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return Backend(verify_torch, "cuda")


BACKENDS = {"torch": lambda: Backend(verify), "interpreted": interpreted, "gpu": on_gpu, "torch-gpu": torch_on_gpu}


def planted(module, old, new, folder):
    """The module with a piece of its source replaced; a file, since Triton reads the source of its kernels."""
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1, old
    name = f"planted_{next(COUNTER)}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(name, path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def require_interpreter():
    """Skip the test if kernels cannot be interpreted on the CPU here."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the kernels run on this machine's GPU; nothing is interpreted")


def require_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
