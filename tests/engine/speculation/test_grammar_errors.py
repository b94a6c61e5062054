"""Requests whose grammar reaches a limit of the library end with an error, with and without drafts; others do not."""

from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import build_engine
from engine.models.tokenizer import Tokenizer
from engine.sampling import grammar_state as module
from engine.sampling.grammar import Grammar
from engine.sampling.grammar_state import GrammarCompiler
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter
from ssd.errors import UserError
from tests.engine.conftest import VOCAB
from tests.engine.integrity import check_integrity
from tests.engine.sampling.test_grammar_state import END, GRAMMARS
from tests.engine.trees import RandomTrees

CONFIG = EngineConfig(max_sequences=8, max_step_tokens=100, max_draft=6, kv_memory_mib=16)
LIMITED = Grammar("regex", r"(\w{1,50}|[a-z]{1,30}\d{1,10}){1,20}")
"""The work for a mask grows with the output."""
MESSAGE = (
    "regex: the output cannot be continued, because llguidance has reached one of its limits: .*too many expressions"
)


@pytest.fixture
def compiler(model, model_folder, monkeypatch):
    """A compiler with small limits, which are reached soon."""
    monkeypatch.setattr(module, "SHARED_FUEL", 5_000)
    monkeypatch.setattr(module, "OWN_FUEL", 20_000)
    return GrammarCompiler(Tokenizer(model_folder), VOCAB, model.config.eos_token_ids)


def requests(max_tokens=70):
    """Two requests that reach a limit, one without a grammar, and one for each of `GRAMMARS`."""
    rng = np.random.default_rng(3)
    return [
        Request(
            rng.integers(1, VOCAB, 9).astype(np.uint32),
            SamplingParams(
                max_tokens=max_tokens,
                seed=seed,
                temperature=0.9,
                grammar=grammar,
                logit_bias={END: -50.0} if grammar is LIMITED else {},
            ),
        )
        for seed, grammar in enumerate([LIMITED, None, LIMITED, *GRAMMARS])
    ]


def run(engine, submitted):
    """Completions and errors by the index of the request."""
    ids = {engine.add(request): index for index, request in enumerate(submitted)}
    completions, refused, outputs = {}, {}, {index: [] for index in ids.values()}
    while engine.scheduler.has_work:
        report = engine.step()
        check_integrity(engine.scheduler)
        for sequence_id, tokens in report.tokens.items():
            outputs[ids[sequence_id]] += tokens.tolist()
        completions |= {ids[sequence_id]: each for sequence_id, each in report.finished.items()}
        refused |= {ids[sequence_id]: each for sequence_id, each in report.refused.items()}
    assert all(completions[index].tokens.tolist() == tokens for index, tokens in outputs.items())
    return completions, refused


@pytest.fixture
def plain(model, compiler):
    engine = build_engine(model, CONFIG, NoDrafter(), grammars=compiler)
    return run(engine, [replace(each, max_draft=0) for each in requests()])


def test_only_requests_that_reach_a_limit_end_with_an_error(plain):
    completions, refused = plain
    assert sorted(refused) == [0, 2]
    for index, reason in refused.items():
        with pytest.raises(UserError, match=MESSAGE):
            raise UserError(reason)
        assert "\n" not in reason
        assert completions[index].finish_reason == "abort"
        assert 5 < len(completions[index].tokens) < 70
    assert all(completions[index].finish_reason in ("stop", "length") for index in (1, 3, 4, 5))


@pytest.mark.parametrize("shape", ["path", "tree"])
@pytest.mark.parametrize("seed", range(2))
def test_drafts_change_neither_outputs_nor_errors(model, compiler, plain, shape, seed):
    """The place where a limit is reached may differ, since the limits count only work that was not done before."""
    completions, refused = plain
    outputs = [completions[index].tokens.tolist() + [50 + seed] * 6 for index in range(len(requests()))]
    drafter = RandomTrees(requests(), outputs, VOCAB)
    engine = build_engine(model, replace(CONFIG, draft_shape=shape), drafter, grammars=compiler)
    found, errors = run(engine, requests())
    assert errors == refused
    for index, expected in completions.items():
        output, other = found[index].tokens.tolist(), expected.tokens.tolist()
        if index in refused:
            output, other = output[: len(other)], other[: len(output)]
        assert output == other
        assert found[index].finish_reason == expected.finish_reason
    assert sum(each.accepted for each in found.values()) > 40


def test_an_output_that_ends_before_the_limit_is_complete(model, compiler, plain):
    completions, _ = plain
    limit = min(len(completions[index].tokens) for index in (0, 2)) - 3
    submitted = requests(limit)
    drafter = RandomTrees(submitted, [each.tokens.tolist() for _, each in sorted(completions.items())], VOCAB)
    found, errors = run(build_engine(model, CONFIG, drafter, grammars=compiler), submitted)
    assert not errors
    assert found[0].tokens.tolist() == completions[0].tokens[:limit].tolist()


def test_generate_raises_the_error_and_ends_all_requests(model, compiler):
    engine = build_engine(model, CONFIG, NoDrafter(), grammars=compiler)
    with pytest.raises(UserError, match=MESSAGE):
        engine.generate(requests())
    assert not engine.scheduler.has_work
    check_integrity(engine.scheduler)
