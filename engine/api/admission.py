"""How many requests may be here at a time: those beyond are refused at once, instead of waiting for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine.api.errors import ApiError


class Admission:
    """Counts requests. The event loop alone uses it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.here = 0
        self.refused = 0

    @contextmanager
    def hold(self, requests: int) -> Iterator[None]:
        """So many requests are here within the block. Raises ApiError 429 if there is no room for them."""
        if self.here + requests > self.most:
            self.refused += requests
            raise ApiError(429, f"the server has {self.here} requests and takes {self.most}; try again later")
        self.here += requests
        try:
            yield
        finally:
            self.here -= requests
