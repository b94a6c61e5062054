"""An encoder whose tokens are bytes, in place of a vocabulary that is downloaded."""

from __future__ import annotations

import re

from benchmarks.traces.conversion import VOCABULARIES

SPECIAL = VOCABULARIES["llama3"].special


class ByteEncoder:
    def encode_ordinary(self, text: str) -> list[int]:
        return [*text.encode()]

    def encode(self, text: str, *, allowed_special: str) -> list[int]:
        assert allowed_special == "all"
        parts = re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text)
        return [token for part in parts for token in ([SPECIAL[part]] if part in SPECIAL else part.encode())]
