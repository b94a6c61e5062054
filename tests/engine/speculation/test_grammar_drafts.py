"""Outputs with a grammar are the same with any drafts; forced tokens are drafted; drafters get results of their own.

Requests whose grammar reaches a limit of the library end with an error, with and without drafts; others do not.
"""

import json
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.drafters.registry import SNAPSHOT_PATH, build_drafter, configure
from engine.drafters.sources import DraftSource
from engine.drafters.tokens import adapt
from engine.engine import Engine, build_engine
from engine.executor.build import Executors
from engine.models.tokenizer import Tokenizer
from engine.sampling import grammar_state
from engine.sampling.grammar import Grammar
from engine.sampling.grammar_state import GrammarCompiler
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.table import HAS_GRAMMAR
from engine.speculation.grammar_drafts import follow_grammar
from engine.speculation.selection import DraftSelection, path_prob
from ssd.baselines.none import NoDrafter
from ssd.config import DrafterConfig
from ssd.errors import UserError
from ssd.types import NO_LIMITS, DraftBatch, Path
from tests.curves import line
from tests.engine.conftest import VOCAB
from tests.engine.integrity import check_integrity
from tests.engine.sampling.test_grammar_state import END, GRAMMARS, SCHEMA, walk
from tests.engine.steps import counted_plan
from tests.engine.trees import RandomTrees, batch_of_trees, random_tree
from tests.replay import branches
from tests.strategies import array

CONFIG = EngineConfig(max_sequences=4, max_step_tokens=100, max_draft=6, kv_memory_mib=16)
MANY = replace(CONFIG, max_sequences=8)
DRAFTERS = ["ssd", "mtp", "rest", "medusa", "lookahead", "draft-model", "recycle", "self-int8"]
"""With paths and trees in turn. The others draft like one of these."""


@pytest.fixture(scope="module")
def compiler(model, model_folder):
    return GrammarCompiler(Tokenizer(model_folder), VOCAB, model.config.eos_token_ids)


def requests(count=12):
    """Requests with each grammar and without one, greedy and sampled, in both modes of verification."""
    rng = np.random.default_rng(3)
    return [
        Request(
            rng.integers(1, VOCAB, rng.integers(1, 20)).astype(np.uint32),
            SamplingParams(
                max_tokens=50,
                seed=seed,
                temperature=(0.0, 0.9)[seed // 2 % 2],
                verification=("exact", "rejection")[seed // 4 % 2],
                grammar=GRAMMARS[seed % 4] if seed % 4 < 3 else None,
                top_p=0.9 if seed % 3 == 0 else 1.0,
                frequency_penalty=0.5 if seed % 5 == 0 else 0.0,
            ),
        )
        for seed in range(count)
    ]


@pytest.fixture(scope="module")
def plain(model, compiler):
    """The outputs without drafts."""
    engine = build_engine(model, CONFIG, NoDrafter(), grammars=compiler)
    return engine.generate([replace(request, max_draft=0) for request in requests()])


def compare(plain, completions):
    """Check that outputs are the same, except those that rejection sampling may change."""
    for request, expected, found in zip(requests(), plain, completions, strict=True):
        if request.sampling.grammar is not None or not request.sampling.uses_rejection:
            assert found.tokens.tolist() == expected.tokens.tolist()
            assert found.finish_reason == expected.finish_reason


def test_plain_outputs_match_their_grammars(plain, model_folder):
    tokenizer = Tokenizer(model_folder)
    for request, completion in zip(requests(), plain, strict=True):
        if request.sampling.grammar == GRAMMARS[0] and completion.finish_reason == "stop":
            assert list(json.loads(tokenizer.decode(completion.content))) == list(SCHEMA["properties"])
        if request.sampling.grammar == GRAMMARS[2]:
            assert tokenizer.decode(completion.content) in json.loads(GRAMMARS[2].text)
    assert all(not completion.drafted for completion in plain)


@pytest.mark.parametrize("shape", ["path", "tree"])
def test_random_drafts_do_not_change_outputs(model, compiler, plain, shape):
    drafter = RandomTrees(requests(), [each.tokens.tolist() for each in plain], VOCAB)
    engine = build_engine(model, replace(CONFIG, draft_shape=shape), drafter, grammars=compiler)
    completions = engine.generate(requests(), lambda _: check_integrity(engine.scheduler))
    compare(plain, completions)
    assert sum(each.by_source["grammar"].accepted for each in completions if "grammar" in each.by_source) > 60
    assert sum(each.by_source["corpus"].accepted for each in completions if "corpus" in each.by_source) > 20
    assert sum(each.steps for each in completions) < 0.8 * sum(each.steps for each in plain)


@pytest.mark.parametrize(("kind", "shape"), [*zip(DRAFTERS, cycle(["path", "tree"]), strict=False)])
def test_no_drafter_changes_outputs(model, model_folder, draft_folders, corpus_file, compiler, plain, kind, shape):
    config = replace(CONFIG, draft_shape=shape)
    settings = DrafterConfig(draft_shape=shape, max_draft=6, capacity=20_000)
    options = {SNAPSHOT_PATH: str(corpus_file)} if kind == "rest" else {}
    info = TargetInfo.from_model(model, config, model_folder)
    drafter = build_drafter(kind, configure(kind, settings, options), info, draft_models=draft_folders)
    engine = build_engine(model, config, drafter, grammars=compiler)
    for _ in range(2):
        compare(plain, engine.generate(requests()))
    engine.close()


@pytest.mark.parametrize("kind", ["ssd", "mtp"])
def test_batches_with_a_grammar_run_without_steps_in_flight(model, model_folder, draft_folders, compiler, plain, kind):
    """In the other steps `mtp` drafts on the device, and requests want no drafts of `ssd`."""
    config = replace(CONFIG, in_flight=1)
    info = TargetInfo.from_model(model, config, model_folder)
    drafter = build_drafter(kind, configure(kind, DrafterConfig(), {}), info, draft_models=draft_folders)
    engine = build_engine(model, config, drafter, grammars=compiler)
    seen = []

    def observe(report):
        has_grammar = report.result is not None and report.result.plan.has(HAS_GRAMMAR)
        seen.append((has_grammar, report.is_ahead))

    compare(plain, engine.generate(requests(), observe))
    drafters = frozenset() if kind == "ssd" else None
    free = [Request(array([1, 2, 3]), SamplingParams(max_tokens=20), drafters=drafters)] * 2
    engine.generate(free, observe)
    engine.close()
    assert (True, True) not in seen
    assert {(True, False), (False, True)} <= set(seen)


class UselessDrafter(NoDrafter):
    """Drafts nothing, but does not declare it."""

    limits = NO_LIMITS


def test_forced_tokens_are_drafted_while_the_drafter_is_not_asked(model, compiler, plain):
    """The drafter is useless, so that the budget seldom calls it."""
    selection = DraftSelection(line(1e-9, 1e-7))  # Calling the drafter takes longer than a step.
    built = build_engine(model, CONFIG, NoDrafter(), grammars=compiler)
    executors = Executors(built._executor, built.scheduler.pages)
    engine = Engine(model.config, CONFIG, executors, adapt(UselessDrafter()), selection=selection, grammars=compiler)
    reports = []
    compare(plain, engine.generate(requests(), reports.append))
    drafted = [len(report.arrays.drafted_sources) for report in reports if report.is_backing_off]
    assert sum(drafted) > 20
    assert selection.calibration == 1


@pytest.mark.parametrize("seed", range(20))
def test_drafts_are_cut_and_extended(compiler, seed):
    rng = np.random.default_rng(seed)
    grammar = GRAMMARS[seed % 3]
    right = [*walk(compiler, grammar, rng), 0]
    start = int(rng.integers(len(right)))
    state = compiler.start(grammar)
    assert all(state.accept(token) for token in right[:start])
    room = int(rng.integers(1, 9))
    tokens, parents = random_tree(rng, right[start:], room, VOCAB)
    probs = rng.random(len(tokens)).astype(np.float32)
    own = replace(batch_of_trees([(tokens, parents)]), accept_prob=probs)
    found = follow_grammar(state, own, room)
    assert {name: column.dtype for name, column in vars(found).items() if name != "pause_steps"} == {
        name: column.dtype for name, column in vars(own).items() if name != "pause_steps"
    }
    assert len(found.tokens) == found.offsets[-1] <= room
    by_path = {path: node for node, path in enumerate(map(tuple, branches(tokens, parents)))}
    paths = [*map(tuple, branches(found.tokens.tolist(), found.parents.tolist()))]
    assert len(set(paths)) == len(paths)
    for path, prob, source in zip(paths, found.accept_prob.tolist(), found.source.tolist(), strict=True):
        before = state.copy()
        assert all(before.accept(token) for token in path[:-1])
        allowed = np.flatnonzero(before.allowed()).tolist()
        assert path[-1] in allowed
        assert (len(allowed) == 1) == (source == DraftSource.GRAMMAR)
        assert prob == (1.0 if len(allowed) == 1 else probs[by_path[path]])
    likely = path_prob(found.accept_prob, found.parents, found.offsets)
    assert (np.diff(likely) <= 1e-12).all()
    if len(paths) < room:
        # Nothing is left out: every token of the draft that is allowed, and what is forced after each.
        for path in [(), *paths]:
            after = state.copy()
            assert all(after.accept(token) for token in path)
            forced = after.forced() if 0 not in path else []
            assert not forced or (*path, forced[0]) in paths
        for path in by_path:
            after = state.copy()
            assert path in paths or not all(is_possible(after, token) for token in path)


def is_possible(state, token):
    """Advance a state if its mask allows the token; return whether it does."""
    return bool(state.allowed()[token]) and state.accept(token)


def test_the_budget_knows_that_forced_tokens_are_accepted():
    """Drafts of the drafter were rejected, so its tokens are not verified; forced ones are."""
    selection = DraftSelection(line(0.5))
    selection._expected = 100.0
    plan = counted_plan(room=3)
    path = Path(array([1, 2, 3]), np.array([1, 1, 0.9], np.float32))
    batch = DraftBatch.from_paths([path])
    assert selection.select(plan, batch, np.array([3])).tolist() == [0]
    batch.source[:2] = DraftSource.GRAMMAR
    assert selection.select(plan, batch, np.array([3])).tolist() == [2]
    assert selection._expected == 100


def test_an_engine_without_a_tokenizer_refuses_grammars(model):
    engine = build_engine(model, CONFIG, NoDrafter())
    with pytest.raises(UserError, match="json_schema needs the model's tokenizer"):
        engine.add(requests()[0])


# --- Limits of the library

LIMITED = Grammar("regex", r"(\w{1,50}|[a-z]{1,30}\d{1,10}){1,20}")
"""The work for a mask grows with the output."""
MESSAGE = (
    "regex: the output cannot be continued, because llguidance has reached one of its limits: .*too many expressions"
)


@pytest.fixture
def limited(model, model_folder, monkeypatch):
    """A compiler with small limits, which are reached soon."""
    monkeypatch.setattr(grammar_state, "SHARED_FUEL", 5_000)
    monkeypatch.setattr(grammar_state, "OWN_FUEL", 20_000)
    return GrammarCompiler(Tokenizer(model_folder), VOCAB, model.config.eos_token_ids)


def limited_requests(max_tokens=70):
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
def refusing(model, limited):
    engine = build_engine(model, MANY, NoDrafter(), grammars=limited)
    return run(engine, [replace(each, max_draft=0) for each in limited_requests()])


def test_only_requests_that_reach_a_limit_end_with_an_error(refusing):
    completions, refused = refusing
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
def test_drafts_change_neither_outputs_nor_errors(model, limited, refusing, shape, seed):
    """The place where a limit is reached may differ, since the limits count only work that was not done before."""
    completions, refused = refusing
    outputs = [completions[index].tokens.tolist() + [50 + seed] * 6 for index in range(len(limited_requests()))]
    drafter = RandomTrees(limited_requests(), outputs, VOCAB)
    engine = build_engine(model, replace(MANY, draft_shape=shape), drafter, grammars=limited)
    found, errors = run(engine, limited_requests())
    assert errors == refused
    for index, expected in completions.items():
        output, other = found[index].tokens.tolist(), expected.tokens.tolist()
        if index in refused:
            output, other = output[: len(other)], other[: len(output)]
        assert output == other
        assert found[index].finish_reason == expected.finish_reason
    assert sum(each.accepted for each in found.values()) > 40


def test_an_output_that_ends_before_the_limit_is_complete(model, limited, refusing):
    completions, _ = refusing
    limit = min(len(completions[index].tokens) for index in (0, 2)) - 3
    submitted = limited_requests(limit)
    drafter = RandomTrees(submitted, [each.tokens.tolist() for _, each in sorted(completions.items())], VOCAB)
    found, errors = run(build_engine(model, MANY, drafter, grammars=limited), submitted)
    assert not errors
    assert found[0].tokens.tolist() == completions[0].tokens[:limit].tolist()


def test_generate_raises_the_error_and_ends_all_requests(model, limited):
    engine = build_engine(model, MANY, NoDrafter(), grammars=limited)
    with pytest.raises(UserError, match=MESSAGE):
        engine.generate(limited_requests())
    assert not engine.scheduler.has_work
    check_integrity(engine.scheduler)
