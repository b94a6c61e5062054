"""Drafts of the first worker, while vLLM's scheduler is a step ahead: what the host's own classes do not show.

`test_conformance.py` runs the worker and both runners in the host's own classes.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import drafter_service.plugins.vllm as plugin
from drafter_service.plugins.options import End, HostLimits, RequestOptions
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.settings import PluginSettings
from drafter_service.plugins.vllm import worker
from drafter_service.plugins.vllm.scheduler import REPORT, StepReport
from drafter_service.plugins.vllm.variants import Choice, Variant
from drafter_service.plugins.vllm.worker import WorkerDrafts, draft_rows
from ssd.budget.padding import Padding
from tests.drafter_service.plugins import signatures
from tests.drafter_service.plugins.vllm.fake_vllm import vllm_config

MAX_DRAFT, VOCAB_SIZE, CONTEXT_WINDOW = 4, 50, 100
LOOP = [1, 2, 3, 1, 2, 3, 1, 2]
CPU = torch.device("cpu")
MADE = (
    worker.worker_class,
    worker.scheduled_runner_class,
    worker.speculating_runner_class,
    worker.null_speculator_class,
)


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
    tokens = np.zeros((len(rows), MAX_DRAFT + 1), np.int64)
    for row, given in zip(tokens, rows, strict=True):
        row[: len(given)] = given
    counts = np.array([len(given) for given in rows])
    ids = ["a", "b", "c"][: len(rows)]
    return drafts.after_step(ids, tokens, counts, np.full(len(rows), verified)).tolist()


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


@pytest.fixture
def host(monkeypatch):
    """Put stand-ins into the place of the host, and let its group have two ranks."""
    signatures.stand_in(signatures.load("vllm"), monkeypatch)
    for function in MADE:
        function.cache_clear()
    sent = []

    def broadcast(tensor, src):
        assert src == 0
        sent.append(tensor)
        return sent[0]

    group = SimpleNamespace(rank_in_group=0, broadcast=broadcast)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda: group)
    yield group
    for function in MADE:
        function.cache_clear()


def test_other_ranks_get_the_drafts_of_the_first(host, drafts, monkeypatch):
    shapes = []
    monkeypatch.setattr(worker, "open_session", lambda _, padding: shapes.append(padding) or drafts.session)
    monkeypatch.setattr(worker, "choose", lambda _: Choice(Variant.V2_WORKER, ""))
    batch = SimpleNamespace(req_ids=["a"], num_reqs=1, num_draft_tokens_per_req=None)
    proposed = []
    for rank in range(2):
        host.rank_in_group = rank
        drafting = plugin.Worker()
        drafting.vllm_config, drafting.device = vllm_config(MAX_DRAFT), CPU
        made = drafting._make_model_runner()
        assert made.speculator.propose(batch, dummy_run=True).tolist() == [[0] * MAX_DRAFT]
        made.update_requests(output(("a", [])))
        made.postprocess_sampled(None, torch.tensor([[3, 5]]), torch.tensor([1], dtype=torch.int32), None)
        proposed.append(made.speculator.propose(batch, None, None).tolist())
        made.shutdown()
    assert proposed == [[[1, 2, 3, 1]]] * 2
    assert shapes == [Padding(lengths=(MAX_DRAFT,))]


def test_methods_have_the_signatures_of_the_host(host):
    recorded = signatures.load("vllm")
    for ours, module in zip(MADE[:3], ("gpu_worker", "gpu.model_runner", "gpu.model_runner"), strict=True):
        ((_, theirs),) = recorded[f"vllm.v1.worker.{module}"].items()
        for name in theirs.keys() & vars(ours()).keys():
            # Arguments that are passed on may be fewer.
            assert theirs[name].startswith(
                signatures.signature_text(vars(ours())[name]).partition(", *args")[0].rstrip(")")
            )
