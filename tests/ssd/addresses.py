"""Conversion of texts to addresses, which kernels take as arguments, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ssd.corpus.ring import PAD
from tests.naive import SEPARATOR
from tests.strategies import array


@dataclass(frozen=True)
class Text:
    """Tokens between separators, in memory that this object owns."""

    tokens: Sequence[int]
    buffer: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        pad = [SEPARATOR] * PAD
        object.__setattr__(self, "buffer", array([*pad, *self.tokens, *pad]))

    @property
    def address(self) -> int:
        """Address of the first token."""
        return int(self.buffer.ctypes.data) + 4 * PAD


def uint32_at(address: int, size: int) -> np.ndarray:
    """Return a copy of `size` uint32 at an address."""
    if size == 0:
        return np.empty(0, np.uint32)
    pointer = ctypes.cast(int(address), ctypes.POINTER(ctypes.c_uint32))
    return np.ctypeslib.as_array(pointer, (int(size),)).copy()
