"""Items to documents: text is tokenized, prompts are cut to what is remembered of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drafter_service.ingest.chunk import Item
from drafter_service.ingest.document import Documents
from drafter_service.ingest.reading import Reading
from ssd.types import offsets_of


def encode(items: Sequence[Item], reading: Reading) -> Documents:
    """Documents in the order of their items; those without any output token are left out."""
    texts = [part for item in items for part in (item.prompt, item.output) if isinstance(part, str)]
    encoded = iter(reading.vocabulary.encode(texts) if reading.vocabulary else ())
    parts: list[np.ndarray] = []
    lengths: list[int] = []
    names: list[str] = []
    for item in items:
        prompt = next(encoded) if isinstance(item.prompt, str) else item.prompt
        output = next(encoded) if isinstance(item.output, str) else item.output
        if len(output) == 0:
            continue
        lead = reading.lead_of(prompt) if prompt is not None else output[:0]
        parts += (lead, output)
        lengths.append(len(lead) + len(output))
        names.append(item.name)
    tokens = np.concatenate(parts) if parts else np.empty(0, np.uint32)
    return Documents(tokens, offsets_of(np.array(lengths, np.int64)), names)
