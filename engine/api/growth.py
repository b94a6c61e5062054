"""A total over time, from its beginning on, in few points."""

from __future__ import annotations

MOST_POINTS = 200


class Growth:
    """Points at some distance or more; whenever there are too many, the distance doubles."""

    def __init__(self, apart_s: float = 1.0) -> None:
        self._apart_s = apart_s
        self._points: list[tuple[float, int]] = []
        self._newest: tuple[float, int] | None = None

    def note(self, time: float, total: int) -> None:
        """So much it is now, in seconds that do not fall."""
        self._newest = (time, total)
        self._add(self._newest)
        while len(self._points) > MOST_POINTS:
            self._apart_s *= 2
            before, self._points = self._points, []
            for point in before:
                self._add(point)

    @property
    def points(self) -> list[tuple[float, int]]:
        """Times and totals, the newest last."""
        if self._newest is None or self._newest == self._points[-1]:
            return self._points[:]
        return [*self._points, self._newest]

    def _add(self, point: tuple[float, int]) -> None:
        if not self._points or point[0] >= self._points[-1][0] + self._apart_s:
            self._points.append(point)
