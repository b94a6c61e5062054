"""How many requests may be here at a time: those beyond are refused at once, instead of waiting for ever."""

from __future__ import annotations

from engine.api.errors import ApiError


class Admission:
    """Counts requests until they have run: whoever reads an answer slowly keeps nobody out. The event loop's alone."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.here = 0
        self.refused = 0

    def enter(self, requests: int) -> None:
        """So many more are here. Raises ApiError: 429 if there is no room for them now, 400 if there never is."""
        if requests > self.most:
            raise ApiError(400, f"n: that is {requests} outputs, and the server takes {self.most} at a time", param="n")
        if self.here + requests > self.most:
            self.refused += requests
            raise ApiError(429, f"the server has {self.here} requests and takes {self.most}; try again later")
        self.here += requests

    def leave(self) -> None:
        """One of them has run, or runs no more."""
        self.here -= 1
