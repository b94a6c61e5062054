"""What a sequence began with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class About:
    """Kept as long as the sequence may have to be told again."""

    prompt: np.ndarray
    """uint32 [P]."""
    session: str
    request: str
    """The name that the service learns it under, once."""
    learn: bool
    """Whether anything of it may be learned, or drafted to others."""
