"""Results contain the source of each draft token and the accepted ones, for complete and truncated paths and trees."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import build_engine
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter
from tests.engine.conftest import VOCAB
from tests.engine.steps import each_of
from tests.engine.trees import RandomTrees, random_tree

ASKED = [
    Request(np.random.default_rng(seed).integers(1, 60, 20).astype(np.uint32), SamplingParams(max_tokens=40))
    for seed in range(5)
]


class ParityTrees(RandomTrees):
    """Drafts random trees in which odd tokens have one source and even ones the other."""

    def __init__(self, answers):
        super().__init__(ASKED, answers, VOCAB)
        self.drafts = {}

    def tree(self, sequence_id, right, limit):
        tree = random_tree(self.rng, right, limit, VOCAB)
        self.drafts[sequence_id] = np.array(tree[0], np.int64)
        return tree

    def draft(self, progress):
        batch = super().draft(progress)
        return replace(batch, source=(batch.tokens % 2).astype(np.uint8))


@pytest.mark.parametrize("shape", ["path", "tree"])
def test_results_have_the_source_of_each_token(model, shape):
    config = EngineConfig(max_sequences=3, max_step_tokens=256, max_draft=9, draft_shape=shape)
    answers = [each.tokens for each in build_engine(model, config, NoDrafter()).generate(ASKED)]
    drafter = ParityTrees(answers)
    kept_elsewhere = 0
    drafted, accepted = Counter(), Counter()

    def observe(report):
        nonlocal kept_elsewhere
        for result in each_of(report.result):
            draft = drafter.drafts[result.sequence_id][: result.drafted]
            drafted.update((result.sequence_id, token % 2) for token in draft)
            accepted.update((result.sequence_id, token % 2) for token in draft[result.kept])
            assert result.sources.tolist() == (draft % 2).tolist()
            assert draft[result.kept].tolist() == result.tokens[: result.accepted].tolist()
            kept_elsewhere += result.kept.tolist() != list(range(result.accepted))

    engine = build_engine(model, config, drafter)
    completions = engine.generate(ASKED, observe)
    assert [each.tokens.tolist() for each in completions] == [each.tolist() for each in answers]
    assert drafted.total() > 20
    for index, completion in enumerate(completions):
        counts = [(drafted[index, source], accepted[index, source]) for source in (0, 1)]
        assert completion.by_source == dict(zip(("corpus", "local"), counts, strict=True))
        assert (completion.drafted, completion.accepted) == tuple(map(sum, zip(*counts, strict=True)))
    assert (kept_elsewhere > 5) is (shape == "tree")
    assert engine.drafter.inner is drafter
