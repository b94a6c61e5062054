"""Optional libraries, imported on first use."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

from ssd.errors import missing_extra


def has_flashinfer() -> bool:
    """Return whether FlashInfer is installed, whether or not a device can run it."""
    return find_spec("flashinfer") is not None


@cache
def has_triton() -> bool:
    """Return whether Triton is installed, whether or not a device can run its kernels."""
    return find_spec("triton") is not None


@cache
def flashinfer() -> Any:
    """Import and return FlashInfer. Raises UserError if that fails."""
    try:
        import flashinfer
    except (ImportError, OSError) as problem:
        raise missing_extra(
            f"FlashInfer cannot be imported ({problem}); give --attention plain or install FlashInfer", "gpu"
        ) from None
    return flashinfer
