"""A fake model: its logits are a function of the previous tokens, which it reads from a cache of tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engine.config import EngineConfig
from engine.drafters.tokens import adapt
from engine.engine import Engine
from engine.executor.build import Executors
from engine.executor.eager import EagerExecutor
from engine.scheduling.pages import PagePool
from tests.engine import chain
from tests.engine.steps import spans_of

VOCAB = 12
EOS = 0
WINDOW = 128
MODEL = replace(chain.MODEL, vocab_size=VOCAB, max_positions=WINDOW, eos_token_ids=(EOS,))
TABLE = np.random.default_rng(7).normal(0, 2, (VOCAB, VOCAB, VOCAB)).round(1).astype(np.float32)


def logits_after(text):
    """Logits, float32 [VOCAB], by the last two tokens; rounded, so that there are ties."""
    return TABLE[text[-2] if len(text) > 1 else 0, text[-1]]


class FakeRunner:
    """Stores tokens in the slots of keys and values, so that misplaced tokens are detected."""

    def __init__(self, pages, page_size):
        self._cache = np.full(pages * page_size, -1)
        self._page_size = page_size

    def move(self, sources, targets):
        self._cache[targets] = self._cache[sources]

    def forward(self, batch):
        self._cache[batch.slots] = batch.tokens
        logits = []
        for row in batch.logit_rows.tolist():
            [span] = [span for span in spans_of(batch) if span.start <= row < span.start + span.length]
            places = visible_places(span, row)
            assert len(places) == batch.positions[row] + 1
            slots = np.array(span.pages)[places // self._page_size] * self._page_size + places % self._page_size
            text = self._cache[slots]
            assert (text >= 0).all()
            logits.append(logits_after(text))
        return torch.from_numpy(np.array(logits, np.float32).reshape(-1, VOCAB))


def visible_places(span, row):
    """Indices within its sequence of the tokens that a token of the batch attends to."""
    place = span.computed + row - span.start
    if not len(span.parents) or place < span.committed:
        return np.arange(place + 1)
    node, ancestors = place - span.committed, []
    while node >= 0:
        ancestors.insert(0, span.committed + node)
        node = span.parents[node]
    return np.array([*range(span.committed), *ancestors])


def fake_engine(drafter, decode, *, max_sequences=4, max_draft=6, max_step_tokens=64, draft_shape="path", pages=200):
    config = EngineConfig(
        max_sequences=max_sequences,
        max_draft=max_draft,
        max_step_tokens=max_step_tokens,
        page_size=4,
        draft_shape=draft_shape,
    )
    executor = EagerExecutor(FakeRunner(pages, config.page_size), config.page_size)
    return Engine(MODEL, config, Executors(executor, PagePool(pages, config.page_size)), adapt(drafter), decode)
