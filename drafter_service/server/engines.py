"""The engines that use a namespace, and what each has used."""

from __future__ import annotations

import time

from drafter_service.observability.facts import MAX_ENGINES, OTHER_ENGINES, Engine, EngineUse
from ssd.stats import Stats


class Engines:
    """A limited number of engines. Used by the event loop alone."""

    def __init__(self) -> None:
        self.uses: dict[Engine, EngineUse] = {}
        self._dropped = Stats()
        """Statistics of the engines that are not in the table any more."""

    def connect(self, engine: Engine) -> EngineUse:
        """Count a stream of an engine, and return the counters for it.

        Beyond `MAX_ENGINES` the engine that has been disconnected for longest is dropped from the table; if all are
        connected, the new one is counted as `OTHER_ENGINES`.
        """
        if engine not in self.uses and len(self.uses) >= MAX_ENGINES and not self._drop_one():
            engine = OTHER_ENGINES
        use = self.uses.setdefault(engine, EngineUse(Stats()))
        use.streams += 1
        return use

    @staticmethod
    def disconnect(use: EngineUse) -> None:
        """Count the end of a stream."""
        use.streams -= 1
        use.disconnected_at = time.monotonic()

    @property
    def steps(self) -> int:
        """Sequence steps of all engines."""
        return self._dropped.steps + sum(use.stats.steps for use in self.uses.values())

    def add_to(self, stats: Stats) -> None:
        """Add the statistics of all engines to `stats`."""
        stats.add(self._dropped)
        for use in self.uses.values():
            stats.add(use.stats)

    def _drop_one(self) -> bool:
        """Drop the engine that has been disconnected for longest; return whether there is one."""
        idle = [engine for engine, use in self.uses.items() if not use.streams]
        if not idle:
            return False
        oldest = min(idle, key=lambda engine: self.uses[engine].disconnected_at)
        self._dropped.add(self.uses.pop(oldest).stats)
        return True
