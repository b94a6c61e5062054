"""An engine of the hash-chain model with more tokens, whose logits are close together, for tests of sampling."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from engine.config import EngineConfig
from engine.drafters.tokens import adapt
from engine.engine import Engine
from engine.executor.build import Executors
from engine.executor.eager import EagerExecutor
from engine.scheduling.pages import PagePool
from tests.engine import chain

VOCAB = 12
EOS = 0
WINDOW = 128
MODEL = replace(chain.MODEL, vocab_size=VOCAB, max_positions=WINDOW, eos_token_ids=(EOS,))


@cache
def scores(context):
    """Logits after a context, list [VOCAB], from -4 to 4; rounded, so that there are ties."""
    return [chain.mixed(context + token + 1) % 81 / 10 - 4 for token in range(VOCAB)]


@cache
def context_of(text):
    return context_of(text[:-1]) + chain.stored(text[-1], context_of(text[:-1])) if text else 0


def logits_after(text):
    """The naive twin: logits after tokens, float32 [VOCAB]."""
    return np.array(scores(context_of(tuple(text))), np.float32)


def fake_engine(drafter, decode, *, pages=200, **settings):
    config = EngineConfig(
        **{"max_sequences": 4, "max_draft": 6, "max_step_tokens": 64, **settings}, page_size=chain.PAGE_SIZE
    )
    executor = EagerExecutor(chain.ChainRunner(pages, scores), config.page_size)
    return Engine(MODEL, config, Executors(executor, PagePool(pages, config.page_size)), adapt(drafter), decode)
