"""Drafts of the first worker, while vLLM's scheduler is a step ahead.

`test_conformance.py` has the tests of outputs with the worker and both runners.
"""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from drafter_service.plugins.options import End, HostLimits, RequestOptions
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.settings import PluginSettings
from drafter_service.plugins.vllm.engine import LOG
from drafter_service.plugins.vllm.scheduler import REPORT, StepReport
from drafter_service.plugins.vllm.worker import draft_rows
from drafter_service.plugins.vllm.worker_drafts import RECENT_STEPS, WorkerDrafts
from ssd.budget.padding import Padding
from tests.drafter_service.plugins.helpers import corpus_of, lines_of, use_equal_steps
from tests.drafter_service.plugins.vllm.host import ASYNC, Engine, vllm_config

MAX_DRAFT, VOCAB_SIZE, CONTEXT_WINDOW = 4, 50, 100
LOOP = [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.fixture
def drafts():
    session = HostSession(PluginSettings("embedded", capacity=20_000), HostLimits(MAX_DRAFT, VOCAB_SIZE), print)
    drafts = WorkerDrafts(session, MAX_DRAFT, CONTEXT_WINDOW)
    yield drafts
    assert session.counters.failures == 0
    drafts.close()


def output(*new, ended=None, **options):
    """Return the `SchedulerOutput` of a step in which requests begin, given as pairs of an id and a text."""
    started = {request_id: RequestOptions(**{"max_tokens": 50, **options}) for request_id, _ in new}
    made = SimpleNamespace(scheduled_new_reqs=[new_data(*each) for each in new])
    setattr(made, REPORT, StepReport(started, ended or {}))
    return made


def new_data(request_id, text):
    sampling = SimpleNamespace(stop_token_ids=[40], eos_token_id=None, extra_args=None)
    return SimpleNamespace(
        req_id=request_id, prompt_token_ids=LOOP, prefill_token_ids=[*LOOP, *text], sampling_params=sampling
    )


def after_step(drafts, *rows, verified=0):
    """Give the tokens of a step of the requests "a", "b", ...; return their drafts."""
    return drafts_and_probs(drafts, rows, verified)[0].tolist()


def drafts_and_probs(drafts, rows, verified=0, networks=()):
    tokens = np.zeros((len(rows), MAX_DRAFT + 1), np.int64)
    for row, given in zip(tokens, rows, strict=True):
        row[: len(given)] = given
    counts = np.array([len(given) for given in rows])
    ids = ["a", "b", "c"][: len(rows)]
    networks = np.array(networks or [[]] * len(rows), np.int64)
    return drafts.after_step(ids, tokens, counts, np.full(len(rows), verified), networks, counts.sum())


def test_drafts_continue_the_text_and_are_filled_with_its_last_token(drafts):
    drafts.update(output(("a", []), ("b", [])))
    assert after_step(drafts, [3], [9]) == [[1, 2, 3, 1], [9, 9, 9, 9]]
    after_step(drafts, [1, 2, 7], [9], verified=MAX_DRAFT)
    counters = drafts.session.counters
    assert (counters.verified, counters.accepted) == (MAX_DRAFT, 2)


def test_requests_without_tokens_or_without_a_beginning_have_no_draft(drafts):
    drafts.update(output(("a", [])))
    assert after_step(drafts, [], [3]) == [[0] * MAX_DRAFT] * 2
    drafts.update(SimpleNamespace(scheduled_new_reqs=[new_data("b", [])]))  # Without a report.
    assert after_step(drafts, [3], [3])[1] == [0] * MAX_DRAFT


@pytest.mark.parametrize(
    ("steps", "options", "wanted"),
    [
        ([[3, 40, 1], [7, 8]], {}, [3, 40]),
        ([[3, 1], [2, 3, 1]], {"max_tokens": 3}, [3, 1, 2]),
        ([[3, 1, 2, 3, 1]] * 19, {"max_tokens": None}, ([3, 1, 2, 3, 1] * 19)[: CONTEXT_WINDOW - len(LOOP)]),
    ],
)
def test_a_text_ends_where_the_host_ends_it_later(drafts, monkeypatch, steps, options, wanted):
    told, finish = [], drafts.session.finish
    monkeypatch.setattr(drafts.session, "finish", lambda *given: told.append(given) or finish(*given))
    drafts.update(output(("a", []), **options))
    for tokens in steps:
        drafted = after_step(drafts, tokens)
    assert drafted == [[steps[-1][-1]] * MAX_DRAFT]
    length = len(LOOP) + len(wanted)
    drafts.update(output(ended={"a": (End.FINISHED, length), "unknown": (End.FINISHED, 3)}))
    assert told == [("a", [*LOOP, *wanted], End.FINISHED)]
    assert "a" not in drafts.session


def test_tokens_after_the_end_that_the_scheduler_reports_are_cut(drafts, monkeypatch):
    told = []
    monkeypatch.setattr(drafts.session, "finish", lambda *given: told.append(given))
    drafts.update(output(("a", [])))
    after_step(drafts, [3, 1, 2])
    drafts.update(output(ended={"a": (End.ABORTED, len(LOOP) + 2)}))
    assert told == [("a", [*LOOP, 3, 1], End.ABORTED)]


def test_an_output_that_the_host_ended_for_a_reason_of_its_own_is_not_learned(drafts):
    for name, length in (("a", 3), ("b", 1)):
        drafts.update(output((name, [])))
        drafts.after_step([name], np.array([[3, 1, 2]]), np.array([3]), np.array([0]), np.empty((1, 0), np.int64), 3)
        drafts.update(output(ended={name: (End.FINISHED, len(LOOP) + length)}))
    assert corpus_of(drafts.session).requests == 1


def test_a_preempted_request_goes_on_with_the_text_of_the_scheduler(drafts, monkeypatch):
    started, start = [], drafts.session.start
    monkeypatch.setattr(drafts.session, "start", lambda *given: started.append(given[0]) or start(*given))
    drafts.update(output(("a", [])))
    after_step(drafts, [3])
    drafts.update(output(("a", [3])))
    # The tokens that follow a prompt are not verified, whatever the scheduler put there.
    assert after_step(drafts, [1], verified=MAX_DRAFT) == [[2, 3, 1, 2]]
    assert drafts.session.counters.verified == 0
    assert started == ["a"]


def test_padding_below_zero_is_a_token_whose_embedding_can_be_looked_up():
    rows, tokens = draft_rows({"a": [5, 6], "b": [-1, -1]}, {"a": 2, "b": 0}, MAX_DRAFT)
    assert rows.tolist() == [2, 0]
    assert tokens.tolist() == [[5, 6, 0, 0], [0, 0, 0, 0]]


def test_probabilities_tell_padding_and_tokens_of_the_network_from_drafts(drafts):
    drafts.update(output(("a", []), ("b", [])))
    found, probs = drafts_and_probs(drafts, [[3], [9], [9]], networks=[[], [], []])
    assert found[1:].tolist() == [[9] * MAX_DRAFT, [0] * MAX_DRAFT]
    assert np.all(probs[0] > 0)
    assert not probs[1:].any()


def test_a_failure_costs_drafts_and_does_not_reach_the_host(drafts, monkeypatch):
    drafts.update(output(("a", [])))
    with monkeypatch.context() as patch:
        patch.setattr(drafts.session, "draft_trees", mock.Mock(side_effect=RuntimeError))
        found, probs = drafts_and_probs(drafts, [[3]], networks=[[5, 6]])
        assert (found.tolist(), probs.tolist()) == ([[5, 6, 3, 3]], [[-1, -1, 0, 0]])
        assert drafts.session.counters.failures == 1
    assert after_step(drafts, [1]) == [[2, 3, 1, 2]]
    drafts.session.counters.failures = 0


def test_steps_have_room_for_the_longest_of_the_last_drafts(drafts):
    sized = WorkerDrafts(drafts.session, MAX_DRAFT, CONTEXT_WINDOW, lengths=(0, 2, 3))
    assert sized.step_length is None
    sized.update(output(("a", [])))
    after_step(sized, [3])
    after_step(sized, [])  # A part of a prompt.
    assert sized.step_length == 3  # The longest of the host's.
    sized.update(output(("a", []), ended={"a": (End.FINISHED, 9)}, max_draft=0))
    for _ in range(RECENT_STEPS):
        assert sized.step_length == 3
        after_step(sized, [1])
    assert sized.step_length == 0
    assert drafts.step_length is None


def test_durations_of_steps_are_those_between_drafts_of_a_request(drafts, monkeypatch):
    recorded = []
    use_equal_steps(monkeypatch, "vllm.worker_drafts")
    monkeypatch.setattr(drafts.session, "record_step", lambda *step: recorded.append(step))
    timed = WorkerDrafts(drafts.session, MAX_DRAFT, CONTEXT_WINDOW, measures=True)
    timed.update(output(("a", []), ("b", [])))
    after_step(timed, [3], [9])
    after_step(timed, [1, 2], [9])
    timed.update(output(ended={"a": (End.FINISHED, 9), "b": (End.FINISHED, 9)}))
    timed.update(output(("c", [])))
    timed.after_step(["c"], np.array([[3]]), np.array([1]), np.array([0]), np.empty((1, 0), np.int64), 9)
    assert recorded == [(3, 2, 1.0)]


# --- With the host's own classes


def test_stages_and_ranks_that_do_not_draft(vllm, monkeypatch):
    for options in ({"stages": 2}, {"ranks": 2}):
        engine = Engine(vllm_config(**ASYNC, **options), monkeypatch)
        assert engine.runner.ssd_drafts is not None
        assert engine.other.ssd_drafts is None
        engine.other.shutdown()
        engine.runner.shutdown()


def test_runs_without_requests_copy_as_much_and_draft_nothing(vllm, monkeypatch):
    engine = Engine(vllm_config(**ASYNC, ranks=2), monkeypatch)
    counts = torch.zeros(3, dtype=torch.int32)
    batch = SimpleNamespace(num_reqs=3)
    drafts = engine.runner.speculator.propose(batch, *[None] * 4, counts, counts, dummy_run=True)
    assert drafts.tolist() == engine.link.sent.pop().tolist() == [[0] * MAX_DRAFT] * 3
    assert engine.runner.ssd_drafts.session.counters.drafted == 0
    engine.runner.shutdown()


BY_REQUESTS = {"num_speculative_tokens_per_batch_size": [[1, 7, 2], [8, 8, 4]]}


@pytest.mark.parametrize(
    ("is_adaptive", "speculation", "padding"),
    [
        (False, {}, Padding(lengths=(MAX_DRAFT,))),
        (False, BY_REQUESTS, Padding(lengths=(2, MAX_DRAFT))),
        (True, BY_REQUESTS, Padding()),
    ],
)
def test_the_drafter_knows_what_steps_are_padded_to(vllm, monkeypatch, is_adaptive, speculation, padding):
    engine = Engine(vllm_config(**ASYNC, is_adaptive=is_adaptive, speculation=speculation), monkeypatch)
    assert engine.runner.ssd_drafts.session._limits.padding == padding
    engine.runner.shutdown()


def test_where_the_host_refuses_a_length_for_each_request_all_have_the_same(vllm, monkeypatch):
    def initialize(self, kv_cache_config, **_):
        if self.speculator.enable_adaptive_verification:
            raise ValueError("Adaptive verification is not supported by the backend.")
        if kv_cache_config is None:
            raise ValueError("no configuration")

    made = Engine(vllm_config(**ASYNC, is_adaptive=True), monkeypatch).runner
    monkeypatch.setattr(type(made).__base__, "initialize_kv_cache", initialize)
    made.rejection_sampler = SimpleNamespace()
    with lines_of(LOG) as lines:
        made.initialize_kv_cache("configuration")
    assert "all requests of a step verify the same number" in "".join(lines)
    assert made.ssd_drafts.session._limits.padding == Padding(lengths=(MAX_DRAFT,))
    assert not made.rejection_sampler.enable_adaptive_verification
    with pytest.raises(ValueError, match="no configuration"):
        made.initialize_kv_cache(None)
    made.shutdown()
