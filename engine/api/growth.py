"""A total over time, from its beginning on, in few points."""

from __future__ import annotations

MOST_POINTS = 200


class Growth:
    """Points at equal distances or more; when there are too many, every other one goes and distances double."""

    def __init__(self, apart_s: float = 1.0) -> None:
        self._apart_s = apart_s
        self._points: list[tuple[float, int]] = []
        self._newest: tuple[float, int] | None = None

    def note(self, time: float, total: int) -> None:
        """So much it is now, in seconds that do not fall."""
        self._newest = (time, total)
        if not self._points or time >= self._points[-1][0] + self._apart_s:
            self._points.append(self._newest)
        if len(self._points) > MOST_POINTS:
            self._points = self._points[::2]
            self._apart_s *= 2

    @property
    def points(self) -> list[tuple[float, int]]:
        """Times and totals, the newest last; between two points the total is the earlier one's or grows."""
        is_newer = self._newest is not None and self._newest != self._points[-1]
        return [*self._points, self._newest] if is_newer and self._newest is not None else list(self._points)
