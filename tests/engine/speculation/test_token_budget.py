"""What pays, against trying everything."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.commands.launch import launch, load
from engine.commands.options import EngineOptions
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Request, SamplingParams
from engine.speculation.token_budget import Asking, Budget, StepCost, path_odds, worth_verifying
from ssd.types import DraftBatch, Path

PROBABILITIES = st.floats(0.01, 1.0)
PATHS = st.lists(st.lists(PROBABILITIES, max_size=4), min_size=1, max_size=3)
RISES = st.lists(st.floats(0, 1.0), min_size=3, max_size=3)


def flat(paths):
    return np.array([odds for path in paths for odds in path]), np.cumsum([0, *map(len, paths)])


def parents_of(paths):
    return np.array([index - 1 for path in paths for index in range(len(path))], np.int32)


def slow_odds(odds, parents, offsets):
    """One token after the other."""
    whole = []
    for start, end in itertools.pairwise(offsets):
        for at in range(start, end):
            whole.append(odds[at] * (1.0 if parents[at] < 0 else whole[start + parents[at]]))
    return whole


@given(PATHS, st.data())
def test_odds_of_a_token_are_those_of_all_its_ancestors_too(drafts, data):
    odds, offsets = flat(drafts)
    parents = [data.draw(st.integers(-1, index - 1)) for draft in drafts for index in range(len(draft))]
    found = path_odds(odds, np.array(parents, np.int32), offsets)
    np.testing.assert_allclose(found, slow_odds(odds, parents, offsets), rtol=1e-9)


def tokens_per_second(paths, lengths, tokens, cost):
    gained = sum(float(np.prod(path[: i + 1])) for path, n in zip(paths, lengths, strict=True) for i in range(n))
    return (len(paths) + gained) / float(cost.seconds(tokens + sum(lengths), len(paths)))


@given(PATHS, RISES, st.integers(0, 20), st.floats(0, 0.5))
def test_no_other_choice_is_quicker(paths, rises, prompt_tokens, per_sequence):
    cost = StepCost([1, 4, 16, 64], np.cumsum([1.0, *rises]), per_sequence)
    tokens = len(paths) + prompt_tokens
    odds, offsets = flat(paths)
    lengths = worth_verifying(path_odds(odds, parents_of(paths), offsets), offsets, tokens, len(paths), cost)
    assert all(0 <= length <= len(path) for length, path in zip(lengths, paths, strict=True))
    best = max(
        tokens_per_second(paths, choice, tokens, cost)
        for choice in itertools.product(*(range(len(path) + 1) for path in paths))
    )
    assert tokens_per_second(paths, lengths, tokens, cost) == pytest.approx(best)


def test_where_every_token_costs_a_step_only_sure_ones_are_verified():
    dear = StepCost([1, 100], [1.0, 100.0])
    offsets = np.array([0, 3])
    assert worth_verifying(np.array([0.9, 0.8, 0.7]), offsets, 1, 1, dear).tolist() == [0]
    free = StepCost([1, 100], [1.0, 1.0])
    assert worth_verifying(np.array([0.1, 0.01, 0.001]), offsets, 1, 1, free).tolist() == [3]


def test_costs_between_and_beyond_what_was_measured():
    cost = StepCost([1, 11, 21], [1.0, 2.0, 4.0])
    assert cost.seconds(np.array([1, 6, 11, 16, 31]), 1).tolist() == [1.0, 1.5, 2.0, 3.0, 6.0]
    # What was disturbed does not make larger steps cheaper.
    assert StepCost([1, 2, 3], [1.0, 5.0, 2.0]).seconds(3, 1) == 5.0
    assert StepCost([1, 2], [1.0, 2.0], 0.5).seconds(2, 3) == 3.0


def test_one_more_token_costs_each_sequence_its_share():
    cost = StepCost([1, 101], [1.0, 2.0])
    assert cost.of_one_more(1, 1) == pytest.approx(0.01)
    assert cost.of_one_more(51, 10) == pytest.approx(10 * 0.01 / 1.5)
    assert StepCost([1, 2], [1.0, 9.0]).of_one_more(1, 1) == 1.0
    assert StepCost([1, 2], [1.0, 1.0]).of_one_more(1, 1) == pytest.approx(1e-4)


def test_steps_correct_what_was_measured():
    cost = StepCost([1, 16, 256], [1.0, 1.0, 1.0])
    for _ in range(400):
        cost.note(16, 1, 3.0)
        cost.note(1, 1, 1.0)
    assert cost.seconds(16, 1) == pytest.approx(3.0, rel=0.1)
    assert cost.seconds(1, 1) == pytest.approx(1.0, rel=0.4)
    before = cost.seconds(256, 1)
    cost.note(256, 1, 1e6)  # a disturbance
    assert cost.seconds(256, 1) < 1.1 * before


def test_what_slowed_the_measuring_down_is_forgotten_for_sizes_that_do_not_occur():
    cost = StepCost([1, 17, 257], [2.0, 2.5, 10.0])  # all of them twice of what they take
    for _ in range(200):
        cost.note(1, 1, 1.0)
    assert cost.seconds(1, 1) == pytest.approx(1.0, rel=0.05)
    assert cost.seconds(17, 1) / cost.seconds(1, 1) < 1.25 * 1.2


def test_a_price_that_is_far_too_high_is_found_out():
    truth, budget = StepCost([1, 17], [1.0, 1.1]), Budget(StepCost([1, 17], [1.0, 40.0]))
    drafts, verified = drafts_of([0.95] * 16), []
    for _ in range(400):
        spent = budget.spend(drafts, np.array([16]), 1)
        verified.append(int(spent.lengths[0]))
        taken = float(truth.seconds(1 + verified[-1], 1))
        budget.note(1 + verified[-1], 1, verified[-1] // 2, taken, Asking(0.001, spent.is_trial))
    assert sum(verified[:19]) == 0
    assert min(verified[-50:]) > 4


def test_trials_cost_little_where_the_price_is_right():
    budget, drafts = Budget(StepCost([64, 81], [1.0, 1.3])), drafts_of(*[[0.9, 0.9, 0.9, 0.9]] * 64)
    dear = Budget(StepCost([1, 17], [1.0, 17.0]))
    tried = [int(dear.spend(drafts_of([0.5] * 16), np.array([16]), 1).lengths.sum()) for _ in range(200)]
    assert sum(tried) == 0  # nothing that may gain two tokens
    for _ in range(200):
        lengths = budget.spend(drafts, np.full(64, 4), 64).lengths
        assert np.count_nonzero(lengths) <= 1
        budget.note(64 + int(lengths.sum()), 64, 0, 1.0 + 0.3 * int(lengths.sum()) / 17, None)


def test_sizes_are_measured_up_to_the_largest():
    asked = []
    cost = StepCost.measured(lambda *size: asked.append(size), [1, 2, 4, 8, 16, 32, 64, 100], 8)
    assert sorted(set(asked)) == [(1, 1), (1, 8), *((size, 1) for size in (2, 4, 8, 16, 32, 64, 100))]
    assert cost.seconds(100, 1) > 0
    assert cost.seconds(1, 8) >= cost.seconds(1, 1)


def test_measuring_ends_when_it_has_taken_long(monkeypatch):
    now = 0.0

    def run(tokens, _sequences):
        nonlocal now
        now += tokens * 0.1

    monkeypatch.setattr("engine.speculation.token_budget.perf_counter", lambda: now)
    cost = StepCost.measured(run, [1, 2, 4, 8, 16, 32, 1000])
    assert cost.seconds(4, 1) == pytest.approx(0.4)
    assert cost.seconds(1000, 1) == pytest.approx(100)  # by the last slope
    assert now < 30


def drafts_of(*paths):
    return DraftBatch.from_paths([Path(np.arange(len(path), dtype=np.uint32), np.array(path)) for path in paths])


CHEAP = StepCost([1, 100], [1.0, 1.5])


@pytest.mark.parametrize("price", [0.002, 0.02, 0.2])
def test_drafts_that_are_never_accepted_cost_a_hundredth_and_get_chances(price):
    budget, drafts = Budget(StepCost([1, 101], [1.0, 1.0 + 100 * price])), drafts_of([1.0] * 16)
    spent = []
    for _ in range(2000):
        spent.append(int(budget.spend(drafts, np.array([16]), 1).lengths[0]))
        budget.note(1 + spent[-1], 1, 0, 1.0 + price * spent[-1], None)
    later = spent[200:]
    assert 0.002 < price * sum(later) / len(later) < 0.04
    assert max(later[-500:]) > 0


def asked_in(budget, steps, *, accepted, drafting_s, step_s=1.0, sequences=1):
    """In which of so many steps the drafter is asked."""
    asked = []
    for step in range(steps):
        asking = None if budget.rests else Asking(drafting_s)
        if asking is not None:
            asked.append(step)
        budget.note(sequences, sequences, 0 if asking is None else accepted, step_s, asking)
    return asked


def test_a_drafter_of_which_nothing_is_accepted_is_asked_ever_less_often():
    asked = asked_in(Budget(CHEAP), 100, accepted=0, drafting_s=0.1)
    assert asked[:6] == [0, 2, 6, 14, 30, 46]
    assert np.diff(asked[4:]).tolist() == [16] * len(np.diff(asked[4:]))


@pytest.mark.parametrize(("drafting_s", "pays"), [(0.4, True), (0.6, False)])
def test_asking_pays_if_accepted_tokens_save_more_than_it_takes(drafting_s, pays):
    # One token accepted beside one that a step makes anyway: half of a step is saved.
    assert (len(asked_in(Budget(CHEAP), 64, accepted=1, drafting_s=drafting_s)) == 64) == pays


@pytest.mark.parametrize(("foreign", "pays"), [(0, True), (1, False)])
def test_what_others_found_saves_a_drafter_nothing(foreign, pays):
    budget = Budget(CHEAP)
    budget.note(1, 1, 1, 1.0, Asking(0.4), foreign)
    assert budget.rests == (not pays)


def test_a_drafter_that_becomes_useful_is_asked_in_every_step_again():
    budget = Budget(CHEAP)
    asked_in(budget, 200, accepted=0, drafting_s=0.01)
    asked = asked_in(budget, 40, accepted=1, drafting_s=0.01)
    assert asked[0] < 16
    assert asked[1:] == list(range(asked[1], 40))


def test_trust_comes_back_while_the_drafter_rests():
    budget, drafts = Budget(CHEAP), drafts_of([1.0] * 16)
    for _ in range(100):
        budget.spend(drafts, np.array([16]), 1)
        budget.note(17, 1, 0, 1.0, None)
    lost = budget.trust
    for _ in range(100):
        budget.note(1, 1, 0, 1.0, None)
    assert lost < 0.1
    assert budget.trust > 2 * lost


def test_who_keeps_what_was_promised_is_trusted():
    budget, drafts = Budget(CHEAP), drafts_of([0.9, 0.9, 0.9], [0.5])
    rng = np.random.default_rng(0)
    for _ in range(500):
        assert budget.spend(drafts, np.array([3, 1]), 2).lengths.tolist() == [3, 1]
        on_path = np.minimum.accumulate(rng.random(3) < 0.9).sum()
        budget.note(6, 2, int(on_path) + int(rng.random() < 0.5), 1.0, None)
    assert budget.trust > 0.85


def test_what_no_step_can_verify_is_no_promise():
    budget, drafts = Budget(CHEAP), drafts_of([1.0] * 9, [1.0] * 9)
    for _ in range(500):
        assert budget.spend(drafts, np.array([4, 0]), 2).lengths.tolist() == [4, 0]
        budget.note(6, 2, 4, 1.0, None)
    assert budget.trust == pytest.approx(1)


def test_the_price_is_that_of_the_step():
    assert Budget(CHEAP).price(51, 10) == CHEAP.of_one_more(51, 10)


def test_an_engine_that_may_draft_nothing_measures_nothing():
    options = EngineOptions.of(
        None, device="cpu", dtype="float32", attention="auto", drafter="ngram", address="", max_draft=0,
        draft_shape="path", max_sequences=1, kv_memory=16, kv_dtype="auto", prefix_cache=True,
        loop="plain", threads=None,
    )  # fmt: skip
    model, tokenizer = load(options), Tokenizer(options.model)
    engine = launch(model, tokenizer, options, warn=print, say=print)
    [completion] = engine.generate([Request(tokenizer.encode("def f(x):"), SamplingParams(max_tokens=5))])
    assert (len(completion.tokens), completion.drafted) == (5, 0)
    drafting = launch(model, tokenizer, replace(options, max_draft=1), warn=print, say=print)
    [again] = drafting.generate([Request(tokenizer.encode("def f(x):"), SamplingParams(max_tokens=5))])
    assert again.tokens.tolist() == completion.tokens.tolist()
