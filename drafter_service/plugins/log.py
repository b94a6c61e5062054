"""The lines of a plug-in in its host's log."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any


class HostLog(logging.LoggerAdapter[logging.Logger]):
    """Writes lines that begin with `ssd-drafter:`, to a logger below a host's own: its handlers and its level apply."""

    def __init__(self, host_logger: str) -> None:
        super().__init__(logging.getLogger(f"{host_logger}.ssd_drafter"))

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message with its prefix."""
        return f"ssd-drafter: {msg}", kwargs
