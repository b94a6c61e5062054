"""The pipelined loop: the plain loop's tokens, from steps that are begun before the last one is known."""

from dataclasses import replace

import numpy as np
import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from engine.drafters.none import NoDrafter
from engine.drafters.registry import KINDS, build_drafter
from engine.executor.graph import Result
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.sequence import Sequence
from engine.speculation.prepared import PreparedDrafting
from engine.speculation.token_budget import Budget, Spent, StepCost
from ssd.config import DrafterConfig
from ssd.types import DraftBatch, Path, Source
from tests.engine.chain import VOCAB, answer, chain_engine
from tests.engine.speculation.test_overlap import Journal
from tests.engine.test_core import CONFIG, outputs, requests

PIPELINED = replace(CONFIG, loop="pipelined")


def drafter_of(name, address):
    # Beyond what a step verifies, so that drafts reach beyond the step before.
    return build_drafter(name, DrafterConfig(capacity=10_000, max_draft=13), address=address, warn=pytest.fail)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", KINDS)
@pytest.mark.parametrize("has_budget", [False, True], ids=["all", "budget"])
def test_the_tokens_are_those_of_the_plain_loop(model, server, socket_address, drafter, temperature, has_budget):
    asked = requests(12, temperature=temperature)
    plain = outputs(build_engine(model, CONFIG, NoDrafter()), asked)
    engine = build_engine(model, PIPELINED, drafter_of(drafter, socket_address), has_budget=has_budget)
    assert outputs(engine, asked) == plain
    again = engine.generate(asked)
    engine.close()
    assert [completion.tokens.tolist() for completion in again] == plain
    # The second time the corpus knows the answers.
    if drafter.startswith("ssd") and not has_budget:
        assert sum(c.accepted for c in again) > 200


def mixed_requests():
    """Of every kind: truncated, greedy, drawn, and such as need the host."""
    settings = [
        {},
        {"temperature": 0.9, "top_k": 5},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 1.2, "min_p": 0.1},
        {"logprobs": 2},
        {"temperature": 0.8, "frequency_penalty": 0.5},
        {"prompt_logprobs": 0},
        {"stop_token_ids": tuple(range(0, 300, 9))},
        {"logit_bias": {7: 5.0}},
    ]
    rng = np.random.default_rng(5)
    return [
        Request(
            rng.integers(1, 60, rng.integers(1, 50)).astype(np.uint32),
            SamplingParams(max_tokens=int(rng.integers(1, 30)), seed=seed, **settings[seed % len(settings)]),
        )
        for seed in range(24)
    ]


def test_requests_that_need_the_host_run_among_others(model):
    asked = mixed_requests()
    plain = build_engine(model, CONFIG, NoDrafter()).generate(asked)
    engine = build_engine(model, replace(PIPELINED, max_sequences=3), drafter_of("ssd", ""))
    # They come one after another, so that the loop changes often.
    for both in zip(engine.generate(asked), plain, strict=True):
        late, expected = both
        assert late.tokens.tolist() == expected.tokens.tolist()
        assert late.finish_reason == expected.finish_reason
        if expected.logprobs is not None:
            np.testing.assert_allclose(late.logprobs.tokens, expected.logprobs.tokens, atol=1e-4)
    assert engine.scheduler.pages.free == engine.scheduler.pages.count


PROMPT = np.array([3, 1, 4, 1, 5], np.uint32)
TOKENS = 60


def journal_of(right, max_draft=4, request_max_draft=None, *, waits=False):
    """A single request, and in which order things are done for it."""
    journal = Journal(right)
    config = EngineConfig(max_sequences=1, max_draft=max_draft, max_step_tokens=64, loop="pipelined")
    engine = chain_engine(config, 40, journal, waits=lambda: waits)
    run, end = engine._grid.run, engine._end_step

    def begin(orders, kind):
        journal.events.append("begin")
        return run(orders, kind)

    def ended(step, watch):
        journal.events.append("read")
        return end(step, watch)

    engine._grid.run, engine._end_step = begin, ended
    [completion] = engine.generate([Request(PROMPT, SamplingParams(max_tokens=TOKENS), max_draft=request_max_draft)])
    engine.close()
    assert completion.tokens.tolist() == answer(PROMPT, TOKENS)
    return journal, completion


@pytest.mark.parametrize("right", [0, 2, 100])
def test_a_step_is_begun_before_the_one_before_it_is_read(right):
    journal, completion = journal_of(right)
    order = [event for event in journal.events if event in ("begin", "read")]
    assert order[:5] == ["begin", "begin", "read", "begin", "read"]
    # Without drafts it is known which step is the last one; with them it may be one before.
    assert 0 <= order.count("begin") - completion.steps <= bool(right)


@pytest.mark.parametrize("right", [0, 2, 100])
def test_a_step_that_is_waited_for_is_read_before_the_next_is_begun(right):
    journal, completion = journal_of(right, waits=True)
    order = [event for event in journal.events if event in ("begin", "read")]
    assert order == ["begin", "read"] * completion.steps
    # Nothing is refused but what the drafter has wrong.
    assert completion.steps == -(-TOKENS // (1 + min(right, 4)))


def test_right_drafts_are_verified_in_every_step():
    _, completion = journal_of(100)
    assert completion.accepted == completion.drafted
    assert completion.steps <= -(-TOKENS // 5) + 1


def test_wrong_drafts_cost_the_next_one_and_no_more():
    """What is prepared beside a step does not fit if its draft is refused."""
    _, completion = journal_of(2)
    assert completion.accepted
    assert completion.steps < TOKENS


def test_padding_is_not_counted_as_drafted():
    """Drafts of 3 run in a shape of 4."""
    _, completion = journal_of(100, max_draft=8, request_max_draft=3)
    assert completion.drafted == completion.accepted <= 3 * completion.steps
    assert completion.drafted + completion.steps == TOKENS


@pytest.mark.parametrize("right", [0, 1, 3, 7, 100])
def test_the_drafter_hears_only_of_its_own_last_draft(right):
    journal, _ = journal_of(right)
    assert all(verified <= offered for offered, verified, _ in journal.outcomes)


def test_a_drafter_of_which_nothing_is_accepted_is_asked_seldom():
    journal, config = Journal(0), EngineConfig(max_sequences=1, max_draft=4, max_step_tokens=64, loop="pipelined")
    engine = chain_engine(config, 40, journal, Budget(StepCost([1, 2], [1.0, 1.0])))
    [completion] = engine.generate([Request(PROMPT, SamplingParams(max_tokens=TOKENS))])
    assert completion.tokens.tolist() == answer(PROMPT, TOKENS)
    # Of what two steps in a row come to is heard when both have begun; the last asking tells what no draft followed.
    assert 4 <= journal.events.count("ask") <= 14


class TryingBudget(Budget):
    """Has every third draft verified as a trial, and notes what it is told of steps."""

    def __init__(self):
        super().__init__(StepCost([1, 2], [1.0, 1.0]))
        self.spent, self.noted = [], []

    @property
    def rests(self):
        return False

    def spend(self, drafts, usable, tokens):
        assert (usable <= np.diff(drafts.offsets)).all()
        is_trial = len(self.spent) % 3 == 2
        lengths = usable if is_trial else np.zeros_like(usable)
        self.spent.append((tokens + int(lengths.sum()), is_trial))
        return Spent(lengths, is_trial)

    def note(self, tokens, sequences, accepted, seconds, asking, foreign=0):
        self.noted.append((tokens, asking.is_trial))


def test_a_trial_is_noted_with_its_own_step():
    budget = TryingBudget()
    config = EngineConfig(max_sequences=1, max_draft=4, max_step_tokens=64, loop="pipelined")
    chain_engine(config, 40, Journal(100), budget).generate([Request(PROMPT[:1], SamplingParams(max_tokens=TOKENS))])
    assert budget.noted == budget.spent[: len(budget.noted)]
    assert (5, True) in budget.noted


def test_prompts_are_timed_with_the_step_behind_them():
    """On a device they run before the step that is begun in the same call, whose time is known a call later."""
    config = EngineConfig(max_sequences=2, max_draft=0, max_step_tokens=64, loop="pipelined")
    engine = chain_engine(config, 40, Silent(), TryingBudget())
    tokens = []
    for prompt in (PROMPT[:1], np.arange(1, 21, dtype=np.uint32) % VOCAB):
        engine.add(Request(prompt, SamplingParams(max_tokens=TOKENS)))
        for _ in range(3):
            engine.step()
            tokens.append(engine._under_way.tokens)
    assert tokens == [1, 1, 1, 2 + 19, 2, 2]


def test_a_step_that_ran_for_nobody_is_not_noted():
    """It was begun before it was known that a stop token had ended the last request."""
    budget = TryingBudget()
    engine = chain_engine(EngineConfig(max_sequences=1, max_draft=4, loop="pipelined"), 40, Journal(0), budget)
    stop = answer(PROMPT, 9)[8]
    engine.generate([Request(PROMPT, SamplingParams(max_tokens=TOKENS, stop_token_ids=(stop,)))])
    assert engine._under_way is not None
    noted = len(budget.noted)
    engine.add(Request(PROMPT, SamplingParams(max_tokens=2)))
    engine.step()
    assert len(budget.noted) == noted


def test_nothing_is_looked_up_beyond_the_end():
    drafting = PreparedDrafting(Misleading(), EngineConfig(max_draft=4, loop="pipelined"), VOCAB)
    for tokens, in_flight, spare in ((1, 0, 0), (2, 0, 1), (2, 1, 0), (9, 0, 4), (1, 1, 0)):
        sequence = Sequence(0, Request(PROMPT, SamplingParams(max_tokens=tokens)), len(PROMPT) + tokens)
        sequence.draft_room, sequence.in_flight = 8, in_flight
        assert drafting._spare(sequence) == spare


class Silent:
    """Finds nothing, and notes what it is told."""

    def __init__(self):
        self.told = []

    def start(self, sequence_id, prompt):
        pass

    def finish(self, sequence_id, tokens, *, verified=0, learn=True):
        self.told.append(verified)

    def close(self):
        pass

    def draft(self, progress):
        self.told += progress.verified.tolist()
        return DraftBatch.empty(len(progress.sequence_ids))


class Misleading(Silent):
    """Drafts what never comes."""

    def draft(self, progress):
        super().draft(progress)
        path = Path(np.zeros(9, np.uint32), np.full(9, 0.9, np.float32))
        return DraftBatch.from_paths([path] * len(progress.sequence_ids))


@pytest.mark.parametrize("drafter", [Silent, Misleading])
@pytest.mark.parametrize("has_budget", [False, True], ids=["all", "budget"])
def test_where_nothing_prepared_fits_the_device_looks_in_the_text(drafter, has_budget):
    """There are few tokens, so that one of seven that are looked up is right."""
    config = EngineConfig(max_sequences=4, max_draft=4, max_step_tokens=64, loop="pipelined")
    budget = Budget(StepCost([1, 2, 400], [1.0, 1.001, 1.1])) if has_budget else None
    engine = chain_engine(config, 200, drafter(), budget)
    rng = np.random.default_rng(0)
    asked = [Request(rng.integers(1, 8, 9).astype(np.uint32), SamplingParams(max_tokens=TOKENS)) for _ in range(12)]
    reports = []
    completions = engine.generate(asked, observe=reports.append)
    engine.close()
    assert [c.tokens.tolist() for c in completions] == [answer(request.prompt, TOKENS) for request in asked]
    assert sum(c.accepted for c in completions) > 40
    assert sum(c.steps + c.accepted for c in completions) == sum(len(c.tokens) for c in completions)
    for outcome in (outcome for report in reports for outcome in report.outcomes):
        # What is right is none of the drafter's.
        assert outcome.accepted == 0 or set(outcome.sources.tolist()) == {Source.LOCAL}
    # For these it need not have waited.
    assert engine._pace.accepted == 0
    told = engine._drafting.drafter.told
    assert any(told) == (drafter is Misleading)


@pytest.mark.parametrize("is_found", [False, True])
def test_a_drafter_is_not_told_of_what_was_looked_up_even_if_it_drafted_the_same(is_found):
    drafter = Misleading()
    drafting = PreparedDrafting(drafter, EngineConfig(max_draft=4, loop="pipelined"), VOCAB)
    sequence = Sequence(0, Request(PROMPT, SamplingParams(max_tokens=TOKENS)), TOKENS)
    sequence.draft_room = 4
    drafting.introduce(sequence)
    [path], _ = drafting.prepare([sequence])
    result = Result(path.tokens[:4], is_found, np.array([0, 0, 0, 0, 1], np.uint32))
    drafting.verified(sequence, path, result)
    sequence.commit(result.tokens, 4)
    drafting.prepare([sequence])
    assert drafter.told[-1] == ((0, 0) if is_found else (4, 4))


def test_without_a_drafter_nothing_is_looked_up(model):
    [completion] = build_engine(model, PIPELINED, NoDrafter()).generate(requests(1, max_tokens=60))
    assert completion.drafted == 0


def test_the_budget_is_asked_for_what_is_left_behind_the_tokens_under_way():
    """All of the step before being accepted, 4 of 9 tokens are left."""
    journal, config = Journal(100), EngineConfig(max_sequences=1, max_draft=4, max_step_tokens=64, loop="pipelined")
    budget = Budget(StepCost([1, 2, 64], [1.0, 1.0, 1.0]))
    offered = []
    spend = budget.spend

    def noted(drafts, usable, tokens):
        assert (usable <= np.diff(drafts.offsets)).all()
        offered.append(usable.tolist())
        return spend(drafts, usable, tokens)

    budget.spend = noted
    engine = chain_engine(config, 40, journal, budget)
    paths = []
    prepare = engine._prepared._worth_verifying

    def worth(sequences, given, own):
        cut, is_trial = prepare(sequences, given, own)
        paths.extend(zip((one.in_flight for one in sequences), cut, strict=True))
        return cut, is_trial

    engine._prepared._worth_verifying = worth
    [completion] = engine.generate([Request(PROMPT, SamplingParams(max_tokens=TOKENS))])
    assert completion.tokens.tolist() == answer(PROMPT, TOKENS)
    assert offered
    for in_flight, path in paths:
        assert path.most <= path.spare <= 4
        assert path.most <= max(0, len(path.tokens) - bool(in_flight))


def test_trees_are_refused():
    with pytest.raises(ValueError, match="path"):
        replace(PIPELINED, draft_shape="tree")
