"""What tests of drafters with networks share: requests, engines with random weights, and logits of the naive twins."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch

from engine.config import EngineConfig
from engine.drafters.autoregressive import AutoregressiveDrafter, Growth
from engine.drafters.medusa import MedusaDrafter
from engine.drafters.sources import DraftSource
from engine.engine import build_engine
from engine.models.heads.medusa import MedusaHeads
from engine.models.layers import PLAIN
from engine.sampling.draft_sampler import DraftSampler
from engine.scheduling.pages import PagePool
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.scheduler import Scheduler
from ssd.baselines.none import NoDrafter
from tests.engine.drafters.heads import make_head, naive_logits
from tests.engine.forward import attend_densely
from tests.engine.integrity import check_integrity

CONFIG = EngineConfig(max_sequences=4, max_step_tokens=64, max_draft=13, page_size=16, kv_memory_mib=1)
TOLERANCE = 2e-3


def requests(temperature, count=8, *, is_plain=False):
    """Prompts with shared prefixes, some longer than a chunk; unless `is_plain`, settings that change the
    distribution."""
    rng = np.random.default_rng(2)
    stem = rng.integers(1, 60, 70)
    submitted = []
    for index in range(count):
        prompt = np.concatenate((stem[: 16 * rng.integers(0, 5)], rng.integers(1, 60, rng.integers(1, 40))))
        top_k, penalty = int(rng.choice([0, 8])), float(rng.choice([1.0, 1.3]))
        sampling = SamplingParams(24, temperature, index, ignore_eos=True)
        if not is_plain:
            sampling = replace(sampling, top_k=top_k, repetition_penalty=penalty)
        submitted.append(Request(prompt.astype(np.uint32), sampling))
    return submitted


def tokens_of(completions):
    return [each.tokens.tolist() for each in completions]


def plain_outputs(model, submitted=requests):
    """Return a function that returns the outputs of plain decoding for arguments of a function that makes requests."""
    return cache(lambda *given: tokens_of(build_engine(model, CONFIG, NoDrafter()).generate(submitted(*given))))


def new_drafter(kind, model, config, *, depth=4, head=None, network=None, is_coupled=False):
    """A drafter with random weights, or with a given head."""
    has_trees = config.draft_shape == "tree"
    how = {"depth": depth, "has_trees": has_trees, "is_coupled": is_coupled}
    head = head or make_head(kind, model)
    if kind == "medusa":
        return MedusaDrafter(head, source=DraftSource.MEDUSA, **how)
    return AutoregressiveDrafter(head, source=DraftSource.DRAFT_MODEL, network=network, **how)


def run(model, config, submitted, drafter, pages=None):
    """Return an engine that has run the requests, and their completions. pages: size of its KV cache."""
    engine = build_engine(model, config, drafter)
    if pages is not None:
        engine.scheduler = Scheduler(config, PagePool(pages, config.page_size))
    completions = engine.generate(submitted)
    check_integrity(engine.scheduler)
    return engine, completions


class Recorder:
    """Records the logits from which draft tokens are sampled."""

    def __init__(self, monkeypatch):
        self.calls = []
        """Text, path of draft tokens (of Medusa heads, their number), and logits after it."""
        self._paths = []
        self._sample, self._expand = DraftSampler.sample, Growth.expand
        monkeypatch.setattr(DraftSampler, "sample", lambda sampler, *inputs: self.sample(sampler, *inputs))
        monkeypatch.setattr(Growth, "expand", lambda growth, depth: self.expand(growth, depth))

    def expand(self, growth, depth):
        self._paths = [growth.pool.path_to(node) for node in growth._frontier.node.tolist()]
        self._expand(growth, depth)
        self._paths = []

    def sample(self, sampler, logits, owner, depth, *rest):
        for own, path, row in zip(owner.tolist(), self._paths or [depth] * len(owner), logits, strict=True):
            self.calls.append((sampler._sequences[own].tokens.copy(), path, row.clone()))
        return self._sample(sampler, logits, owner, depth, *rest)

    def largest_difference(self, head, target, count=60):
        """Largest relative difference between recorded logits and those of the naive twin, for some of the calls."""
        own = [call for call in self.calls if isinstance(call[1], int) == isinstance(head, MedusaHeads)]
        differences = []
        for text, path, row in own[:: max(1, len(own) // count)]:
            expected = naive_medusa(head, target, text)[path] if isinstance(path, int) else (
                naive_logits(head, target, text, path)[-1]
            )  # fmt: skip
            found = row if isinstance(path, int) or head.draft_vocabulary is None else row[head.draft_vocabulary]
            differences.append(float((expected - found).abs().max() / expected.abs().max()))
        return max(differences)


@torch.inference_mode()
def naive_medusa(heads, target, text):
    """Logits of all heads after the text, from the target's states of the whole text."""
    tokens = torch.from_numpy(text.astype(np.int64))
    hidden, _ = target.hidden_states(tokens, torch.arange(len(tokens)), attend_densely, PLAIN)
    return heads(hidden[-2:-1])[0]
