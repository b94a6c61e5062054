"""A model without weights whose tokens depend on all keys and values in their context, and its naive twin.

The cache entry of a token is a hash of the token and of all earlier entries, so a page that is lost, stale, wrongly
shared or overwritten changes all following tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import torch

from engine.drafters.base import NO_OUTPUTS
from engine.drafters.tokens import adapt
from engine.engine import Engine
from engine.executor.build import Executors, build_graph_executor
from engine.executor.eager import EagerExecutor
from engine.models.config import ModelConfig
from engine.scheduling.pages import PagePool
from tests.engine.steps import spans_of

VOCAB = 8
END = 0
WINDOW = 96
PAGE_SIZE = 4
MODEL = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_positions=WINDOW,
    eos_token_ids=(END,),
)


def mixed(number):
    """SplitMix64's finalizer, on Python's integers."""
    mask = (1 << 64) - 1
    number = ((number & mask) ^ ((number & mask) >> 30)) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & mask
    return number ^ (number >> 31)


def stored(token, context):
    """The cache entry of a token; `context` is the sum of the entries before it."""
    return mixed(token + 1 + mixed(context))


def scores(context):
    """Logits after a context, list [VOCAB]; the end token is rarely the best."""
    return [mixed(context + token + 1) % 10_007 - (8_000 if token == END else 0) for token in range(VOCAB)]


def contents(tokens):
    """The cache entries of `tokens`."""
    held, context = [], 0
    for token in tokens:
        held.append(stored(int(token), context))
        context += held[-1]
    return held


def answer(prompt, max_tokens):
    """The naive twin: greedy decoding of a single request without pages."""
    output, context = [], sum(contents(prompt))
    while len(output) < min(max_tokens, WINDOW - len(prompt)) and END not in output:
        logits = scores(context)
        output.append(logits.index(max(logits)))
        context += stored(output[-1], context)
    return output


class ChainRunner:
    """Replaces `Runner`; reads and writes its cache only through page tables and slots."""

    def __init__(self, pages, scores=scores):
        """scores: returns the logits after a context."""
        self.cache = [mixed(slot) for slot in range(pages * PAGE_SIZE)]
        self.scores = scores

    def held(self, pages, count):
        """The cache entries of the first `count` tokens of a page table."""
        return [self.cache[pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE] for i in range(count)]

    def move(self, sources, targets):
        contents = [self.cache[source] for source in sources]
        for target, content in zip(targets, contents, strict=True):
            self.cache[target] = content

    def forward(self, batch):
        rows = [None] * len(batch.tokens)
        for span in spans_of(batch):
            context = sum(self.held(span.pages, span.computed))
            for row in range(span.start, span.start + span.length):
                node = span.computed + row - span.start - span.committed
                if len(span.parents) and node >= 0:
                    # Row of the parent; for -1 that of the last committed token.
                    context = rows[row - node + int(span.parents[node])]
                content = stored(int(batch.tokens[row]), context)
                self.cache[batch.slots[row]] = content
                context += content
                rows[row] = context
        logits = [self.scores(rows[row]) for row in batch.logit_rows]
        return torch.tensor(logits, dtype=torch.float32).view(-1, len(self.scores(0)))

    def fixed(self, shape):
        return ChainForward(self, shape)


class ChainForward:
    """Steps of one shape on the same cache."""

    def __init__(self, runner, shape):
        self.runner = runner
        self.shape = shape

    def plan(self, contexts, rows):
        self.planned = contexts, rows.tolist()

    def __call__(self, inputs, page_tables):
        rows = []
        starts = inputs.starts.tolist()
        assert [end - start for start, end in itertools.pairwise(starts)] == self.planned[1]
        assert starts[-1] <= self.shape.rows == len(inputs.tokens)
        for index, (known, table) in enumerate(zip(inputs.contexts.tolist(), page_tables.tolist(), strict=True)):
            length = int(inputs.counts[index])
            if length:
                assert known <= self.planned[0][index]
            context = sum(self.runner.held(table, known)) if length else 0
            for row in range(starts[index], starts[index + 1]):
                content = stored(int(inputs.tokens[row]), context)
                self.runner.cache[inputs.cache_slots[row]] = content
                context += content
                rows.append(context)
        rows += [0] * (len(inputs.tokens) - len(rows))
        return torch.tensor([scores(row) for row in rows], dtype=torch.float32).view(-1, VOCAB)


class AtRandom:
    """True or false at random, for `Engine._may_run_ahead`."""

    def __init__(self):
        self._rng = np.random.default_rng(9)

    def __bool__(self):
        return bool(self._rng.integers(2))


def decode(tokens):
    """A letter for each token."""
    return "".join(chr(ord("a") + token) for token in tokens.tolist())


def chain_engine(config, pages, drafter, selection=None, *, in_flight=None, drafters=()):
    """An engine with this model.

    in_flight: largest number of steps in flight when a step is launched, 0, 1 or "any", with the graph executor unless
    the drafter needs the target's outputs; None: the eager executor.
    """
    drafter = adapt(drafter)
    runner, pool = ChainRunner(pages + 1), PagePool(pages, PAGE_SIZE)
    has_graph = in_flight is not None and drafter.needs == NO_OUTPUTS
    graph = build_graph_executor(MODEL, config, runner, pool, "cpu") if has_graph else None
    executors = Executors(EagerExecutor(runner, PAGE_SIZE, drafter.needs), pool, graph)
    config = replace(config, in_flight=1 if in_flight == "any" else in_flight)
    engine = Engine(MODEL, config, executors, drafter, decode, selection, drafters=drafters)
    if in_flight == "any":
        engine._may_run_ahead = AtRandom()
    return engine
