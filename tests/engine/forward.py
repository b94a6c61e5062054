"""Forward passes outside of the engine's loop, for tests of logits."""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.plain import PlainAttention
from engine.executor.runner import Runner
from engine.scheduling.page_hashes import PageHashes
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.sequence import Sequence
from tests.engine.steps import Entry, batch_of
from tests.engine.tables import give_pages

PAGE_SIZE = 16


def sequence_of(tokens, pages, *, computed=0, scheduled=None, draft=(), tree=None, sequence_id=0):
    """The part of a sequence with `computed` tokens in the cache that runs `scheduled` more tokens and a draft."""
    sequence = Sequence(sequence_id, Request(np.asarray(tokens, np.uint32), SamplingParams()), len(tokens) + 64)
    give_pages(sequence, pages)
    sequence.computed = computed
    scheduled = len(tokens) - computed if scheduled is None else scheduled
    return Entry(sequence, computed, scheduled, np.asarray(draft, np.uint32), tree)


def new_runner(model, pages=128):
    """A runner with an empty cache."""
    return Runner(model, PlainAttention(model.config, pages, PAGE_SIZE, model.embedding.weight.dtype, "cpu"))


def prompt_logits(model, tokens):
    """Logits after every token, float32 [N, vocab], from one pass: all tokens but the first run as a draft."""
    pages = range(-(-len(tokens) // PAGE_SIZE))
    entry = sequence_of(tokens[:1], pages, draft=tokens[1:])
    return new_runner(model, len(pages)).forward(batch_of([entry], PAGE_SIZE))


def attend_densely(_layer, query, key, value):
    """Attention of each token to itself and to all tokens before it, without pages."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[2] ** -0.5
    scores = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value)


def cached_and_fresh(model, engine, text):
    """For each page of a text in the engine's cache, return its keys and values, and recomputed ones.

    Both are float32 [2, layers, ...]: keys, then values.
    """
    pool, hashes = engine.scheduler.pages, PageHashes("")
    pages = pool.find(hashes.of(np.asarray(text, np.uint32), (len(text) - 1) // PAGE_SIZE, PAGE_SIZE)).tolist()
    runner = new_runner(model, 32)
    runner.forward(batch_of([sequence_of(text, range(32))], PAGE_SIZE))

    def held(runner, page):
        return torch.stack([cached[:, page] for cached in runner.attention.pages])

    return [
        (held(engine._executor.runner, page), held(runner, index))
        for index, page in enumerate(pages)
        if page is not None
    ]
