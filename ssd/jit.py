"""How kernels are compiled: ahead of time, into a cache, without the GIL. The only place that names numba's settings.

A kernel states its signature, so it is compiled when its module is first imported and loaded from the
cache ever after; no call ever waits for a compiler. Inputs are declared read-only, which accepts
writable arrays too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit, types

F = TypeVar("F", bound=Callable[..., Any])

Tokens = types.Array(types.uint32, 1, "C", readonly=True)
"""uint32 [N], read only: token ids or positions."""
TokensOut = types.Array(types.uint32, 1, "C")
"""uint32 [N], written by the kernel."""
FloatsOut = types.Array(types.float32, 1, "C")
"""float32 [N], written by the kernel."""
Int = types.int64
Float = types.float64


def kernel(*signature: types.Type, returns: types.Type) -> Callable[[F], F]:
    """Compile a function for one signature; it runs without the GIL and is cached on disk."""
    return njit(returns(*signature), nogil=True, cache=True, boundscheck=False)


inline = njit(nogil=True, cache=True, inline="always")
"""For helpers that are part of the kernels that call them."""
