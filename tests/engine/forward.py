"""Forward passes outside the engine's loop, for tests that look at logits."""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.plain import PlainAttention
from engine.executor.batch import build_batch
from engine.executor.eager import Runner
from engine.scheduling.page_hashes import PageNames
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.sequence import Sequence

PAGE_SIZE = 16


def sequence_of(tokens, pages, *, computed=0, scheduled=None, draft=(), sequence_id=0):
    """A sequence in mid-life: `computed` tokens are in the cache, `scheduled` ones and a draft run next."""
    sequence = Sequence(sequence_id, Request(np.asarray(tokens, np.uint32), SamplingParams()), len(tokens) + 64)
    sequence.pages = list(pages)
    sequence.computed = computed
    sequence.scheduled = len(tokens) - computed if scheduled is None else scheduled
    sequence.draft = np.asarray(draft, np.uint32)
    return sequence


def new_runner(model, pages=128):
    """A runner with an empty cache."""
    return Runner(model, PlainAttention(model.config, pages, PAGE_SIZE, torch.float32, "cpu"))


def prompt_logits(model, tokens):
    """Logits behind every token, float32 [N, vocab], from one pass: all but the first token run as a draft."""
    pages = range(-(-len(tokens) // PAGE_SIZE))
    sequence = sequence_of(tokens[:1], pages, draft=tokens[1:])
    return new_runner(model, len(pages)).forward(build_batch([sequence], PAGE_SIZE))


def cached_and_fresh(model, engine, text):
    """Of each page of a text that the engine's cache has: what it holds, and what a fresh computation gives.

    Both float32 [2, layers, ...]: keys, then values.
    """
    pool, names = engine.scheduler.pages, PageNames("")
    pages = [pool.find(names.name(text, index, PAGE_SIZE)) for index in range((len(text) - 1) // PAGE_SIZE)]
    runner = new_runner(model, 32)
    runner.forward(build_batch([sequence_of(text, range(32))], PAGE_SIZE))

    def held(runner, page):
        return torch.stack((runner._attention._keys[:, page], runner._attention._values[:, page]))

    return [(held(engine._runner, page), held(runner, index)) for index, page in enumerate(pages) if page is not None]
