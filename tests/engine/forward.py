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


class DenseAttention:
    """Attention of each token to itself and to all tokens before it, over several calls, without pages."""

    def __init__(self):
        self.keys, self.values = {}, {}

    def __call__(self, layer, query, key, value):
        before = self.keys.get(layer, key[:0]), self.values.get(layer, value[:0])
        keys, values = torch.cat((before[0], key)), torch.cat((before[1], value))
        self.keys[layer], self.values[layer] = keys, values
        share = query.shape[1] // keys.shape[1]
        scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(share, 1)) / query.shape[-1] ** 0.5
        rows = torch.arange(len(keys) - len(query), len(keys))[:, None]
        scores = scores.masked_fill(torch.arange(len(keys)) > rows, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(share, 1))


def attend_densely(*given):
    """Attention within one call, see `DenseAttention`."""
    return DenseAttention()(*given)


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
