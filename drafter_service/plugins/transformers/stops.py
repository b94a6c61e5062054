"""Where the rows of a batch end: the host's stopping criteria, for one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

EXACT_CRITERIA = ("EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria")
"""Criteria at which assisted decoding stops where plain decoding stops. It checks others once per step, not once per
token, and would return more tokens than plain decoding."""

ROW_CRITERIA = (*EXACT_CRITERIA, "StopStringCriteria")
"""Criteria that `Stops` checks for each token of each row."""


class Stops:
    """The stopping criteria of a batch."""

    def __init__(self, criteria: Sequence[Any], max_length: int) -> None:
        """criteria: those of `ROW_CRITERIA`. max_length: maximum length of a row, prompt and padding included."""
        by_name: dict[str, list[Any]] = {name: [] for name in ROW_CRITERIA}
        for each in criteria:
            by_name[type(each).__name__].append(each)
        self.end_tokens = [token for each in by_name["EosTokenCriteria"] for token in each.eos_token_id.tolist()]
        self._max_length = max_length
        self._strings = by_name["StopStringCriteria"]
        self._times = by_name["MaxTimeCriteria"]

    def cut(self, row: Any, length: int, tokens: list[int]) -> tuple[list[int], bool]:
        """Return the tokens up to the first at which the row ends, and whether it ends.

        row: int64 [1, N], of which `length` tokens are followed by `tokens`.
        """
        for count, token in enumerate(tokens, 1):
            end = length + count
            is_last = token in self.end_tokens or end >= self._max_length
            if is_last or any(each(row[:, :end], None).item() for each in self._strings):
                return tokens[:count], True
        return tokens, False

    def is_late(self, rows: Any) -> bool:
        """Return whether the time for all rows is over; rows: int64 [B, N]."""
        return any(each(rows, None)[0].item() for each in self._times)
