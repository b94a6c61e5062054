"""Choose the draft shape, path or tree, from the measured cost of verifying each on this machine.

If an additional token is cheap, trees gain up to 16 % throughput over paths; if it is expensive, they gain nothing. A
step with a tree may take longer, because attention needs a mask.
"""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.backend import choose_backend
from engine.executor.batch import Batch, build_batch
from engine.executor.ranks.messages import Cache
from engine.executor.ranks.runner import open_runner
from engine.executor.runner import Runner
from engine.models.decoder import Decoder
from engine.scheduling.plan import SequencePlan
from engine.scheduling.request import Request
from engine.scheduling.sequence import Sequence
from engine.speculation.draft_tree import DraftTree
from ssd.config import DraftShape

COSTS = (0.005, 0.02, 0.05, 0.1)
TREE_GAINS = (1.160, 1.070, 1.023, 1.005)
"""Throughput of trees relative to paths on recorded traffic, if an additional token costs `COSTS` (fractions of a
step); see section 6 of docs/drafting.md."""
DRAFT_TOKENS = 8
"""Number of tokens in the measured drafts; on recorded traffic, trees have 9 tokens at a cost of 0.02."""
CONTEXT = 256
PAGE_SIZE = 16
MIN_ADVANTAGE = 1.05
"""Minimum expected speed-up for choosing trees. They store keys in a different order than decoding without drafts,
which may resolve near ties differently, and measurements vary by a few percent."""
MAX_ROUNDS = 40
MIN_ROUNDS = 2
MEASURING_S = 1.0
"""Seconds after which no further round starts, since large models need seconds per round."""


class StepRatios(NamedTuple):
    """Ratios of the durations of steps of one sequence."""

    path_to_plain: float
    """Step with a path of `DRAFT_TOKENS` tokens to a step without a draft."""
    tree_to_path: float
    """Step with a tree of `DRAFT_TOKENS` tokens to a step with a path of the same length."""


def choose_draft_shape(model: Decoder, attention: str) -> DraftShape:
    """Return the shape with the higher expected throughput for a loaded model.

    Always `path` on a GPU, where CUDA graphs only run paths. attention: as in `choose_backend`. Raises UserError for an
    attention backend that is not available.
    """
    if model.embedding.weight.is_cuda or model.config.max_positions <= 2 * DRAFT_TOKENS:
        return "path"  # A shorter context window has no room for the measured steps.
    return faster_shape(_measure(model, attention))


def faster_shape(steps: StepRatios) -> DraftShape:
    """Return `tree` if trees are expected to be faster by at least `MIN_ADVANTAGE`, otherwise `path`."""
    cost = (steps.path_to_plain - 1) / DRAFT_TOKENS
    gain = np.interp(np.log(max(cost, COSTS[0])), np.log(COSTS), TREE_GAINS)
    return "tree" if gain >= MIN_ADVANTAGE * steps.tree_to_path else "path"


def _measure(model: Decoder, attention: str) -> StepRatios:
    """Time the three kinds of steps alternately and return the medians of the ratios within each round."""
    dtype, device = model.embedding.weight.dtype, str(model.embedding.weight.device)
    backend = choose_backend(attention, model.config, dtype, device)
    context = min(CONTEXT, model.config.max_positions - DRAFT_TOKENS - 1)
    pages = -(-(context + 1 + DRAFT_TOKENS) // PAGE_SIZE)
    runner = open_runner(model, Cache(backend, pages + 1, PAGE_SIZE, dtype))
    nodes = np.arange(DRAFT_TOKENS, dtype=np.int32)
    batches = [
        _step(context, pages, 0, None),
        _step(context, pages, DRAFT_TOKENS, None),
        _step(context, pages, DRAFT_TOKENS, DraftTree((nodes - 1) // 2)),
    ]
    rounds: list[list[float]] = []
    for batch in batches:
        _run(runner, batch)  # The first call allocates and compiles.
    began = perf_counter()
    while len(rounds) < MIN_ROUNDS or (len(rounds) < MAX_ROUNDS and perf_counter() - began < MEASURING_S):
        rounds.append([_run(runner, batch) for batch in batches])
    plain, path, tree = np.array(rounds).T
    return StepRatios(float(np.median(path / plain)), float(np.median(tree / path)))


def _step(context: int, pages: int, drafted: int, tree: DraftTree | None) -> Batch:
    sequence = Sequence(0, Request(np.zeros(context + 1, np.uint32)), context + 1 + DRAFT_TOKENS)
    sequence.pages = list(range(pages))
    draft = np.zeros(drafted, np.uint32)
    return build_batch([SequencePlan(sequence, context, 1, produces=True, draft=draft, tree=tree)], PAGE_SIZE)


def _run(runner: Runner, batch: Batch) -> float:
    began = perf_counter()
    with torch.inference_mode():
        runner.forward(batch).argmax(dim=-1).cpu()
    return perf_counter() - began
