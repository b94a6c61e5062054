"""Libraries that an engine can do without, imported when they are needed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

from ssd.errors import UserError


def has_flashinfer() -> bool:
    """Whether FlashInfer is installed; says nothing of a device to run it on."""
    return find_spec("flashinfer") is not None


@cache
def has_triton() -> bool:
    """Whether Triton is installed; says nothing of a device to run its kernels on."""
    return find_spec("triton") is not None


@cache
def flashinfer() -> Any:
    """The module. Raises UserError where it cannot be imported."""
    try:
        import flashinfer
    except (ImportError, OSError) as problem:
        raise UserError(
            f"FlashInfer cannot be imported ({problem}); install it with pip install 'ssd-drafter[gpu]', "
            "or give --attention plain"
        ) from None
    return flashinfer
