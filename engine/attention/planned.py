"""A wrapper of FlashInfer's that may be planned while the device has still to do what was planned before."""

from __future__ import annotations

from typing import Any

import torch


class Planned:
    """Each wrapper has pinned memory of its own, which a plan writes and the device then copies: the next plan waits
    until it has.
    """

    def __init__(self, wrapper: Any, device: str) -> None:
        self._wrapper = wrapper
        self._copied = torch.cuda.Event() if torch.device(device).type == "cuda" else None

    def plan(self, *given: Any, **named: Any) -> None:
        """As the wrapper's."""
        if self._copied is not None:
            self._copied.synchronize()
        self._wrapper.plan(*given, **named)
        if self._copied is not None:
            self._copied.record()

    def run(self, *given: Any, **named: Any) -> Any:
        """As the wrapper's."""
        return self._wrapper.run(*given, **named)
