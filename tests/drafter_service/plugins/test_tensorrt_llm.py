"""The plug-in for TensorRT-LLM, with stand-ins that have the signatures of the host's published source.

The host's package contains CUDA libraries that its Python modules import, so none of it runs here.
"""

import inspect
import pickle
from types import SimpleNamespace

import pytest

from drafter_service.plugins import tensorrt_llm as plugin
from drafter_service.plugins.options import RequestOptions
from tests.drafter_service.plugins.helpers import corpus_of, lines_of, plain, stand_in, verified

MAX_DRAFT = 4
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]


class Drafter:
    def __init__(self, max_draft_len=None, max_total_draft_tokens=None, max_concurrency=None, draft_len_schedule=None):
        pass

    def prepare_draft_tokens(self, scheduled_requests, resource_manager=None):
        pass


class BaseResourceManager:
    def get_max_resource_count(self):
        pass

    def get_needed_resource_to_completion(self, request):
        pass

    def free_resources(self, request):
        pass

    def shutdown(self):
        pass


HOST = {
    "tensorrt_llm._torch.speculative.drafter": {"Drafter": Drafter},
    "tensorrt_llm._torch.pyexecutor.resource_manager": {"BaseResourceManager": BaseResourceManager},
    "tensorrt_llm._utils": {"mpi_world_size": lambda: 1},
}


class Request:
    """The attributes of a host's request that the plug-in uses."""

    def __init__(self, request_id=1, prompt=PROMPT, max_tokens=20, **more):
        self.py_request_id, self.py_orig_prompt_len, self.py_max_new_tokens = request_id, len(prompt), max_tokens
        self.tokens = list(prompt)
        self.py_draft_tokens = [0] * MAX_DRAFT
        self.is_finished = self.is_finished_due_to_cancellation = False
        self.is_attention_dp_dummy = self.is_cuda_graph_dummy = False
        vars(self).update(more)

    def get_tokens(self, beam):
        assert beam == 0
        return self.tokens.copy()

    @property
    def output(self):
        return self.tokens[self.py_orig_prompt_len :]


@pytest.fixture
def drafter_class(monkeypatch):
    stand_in(HOST, monkeypatch)
    monkeypatch.setattr(plugin, "version", lambda _: "1.2.1")
    plugin.drafter_class.cache_clear()
    yield plugin.SsdDrafter
    plugin.drafter_class.cache_clear()


@pytest.fixture
def drafter(drafter_class):
    drafter = drafter_class("model", max_draft_len=MAX_DRAFT, vocab_size=50, sidecar="embedded", capacity=20_000)
    yield drafter
    drafter.shutdown()


@pytest.fixture
def log():
    with lines_of(plugin.LOG) as lines:
        yield lines


def test_kernels_are_compiled_before_the_first_request(drafter):
    assert prepare(drafter) == []  # As in the host's own warm-up.
    assert drafter._ssd_session.namespaces.opened["", ""].drafter is not None


def prepare(drafter, *requests):
    drafter.prepare_draft_tokens(SimpleNamespace(generation_requests=list(requests)), None)
    return [request.py_draft_tokens for request in requests]


def test_drafts_are_as_long_as_the_padding(drafter):
    prepare(drafter, Request())
    assert drafter._ssd_session._limits.padding.lengths == (MAX_DRAFT,)


def step(drafter, *requests):
    """Run a step as the host does: drafts, padding in place, verification, and the ends of requests."""
    prepare(drafter, *requests)
    for request in requests:
        draft = request.py_draft_tokens
        assert len(draft) <= MAX_DRAFT
        draft.extend([0] * (MAX_DRAFT - len(draft)))
        request.tokens += verified(request.tokens, draft)[: request.py_max_new_tokens - len(request.output)]
        if len(request.output) >= request.py_max_new_tokens:
            request.is_finished = True
            drafter.free_resources(request)


def test_methods_have_the_signatures_of_the_host(drafter_class):
    for name, theirs in {**vars(Drafter), **vars(BaseResourceManager)}.items():
        if not name.startswith("_"):
            ours = inspect.signature(vars(drafter_class)[name])
            assert list(ours.parameters) == list(inspect.signature(theirs).parameters)


def test_the_drafter_is_sent_to_another_process(drafter):
    prepare(drafter, Request())
    config = {"drafter": drafter, "resource_manager": drafter}
    copy = pickle.loads(pickle.dumps(config))
    assert copy["drafter"] is copy["resource_manager"]
    assert copy["drafter"]._ssd_session is None
    assert prepare(copy["drafter"], Request()) == [[3, 1, 2, 3]]
    copy["drafter"].shutdown()


def test_outputs_are_those_without_drafts_and_take_fewer_steps(drafter):
    prompts = {1: [1, 2, 3], 2: [4, 5, 6, 1, 2, 3], 3: [2, 2]}
    counts = []
    for _ in range(2):
        requests = [Request(request_id, prompt) for request_id, prompt in prompts.items()]
        steps = 0
        while running := [request for request in requests if not request.is_finished]:
            step(drafter, *running)
            steps += 1
        for request in requests:
            assert request.output == plain(prompts[request.py_request_id], 20)
            assert request.py_request_id not in drafter._ssd_session
        counts.append(steps)
        corpus_of(drafter._ssd_session)
    assert counts[1] < counts[0] <= 20
    assert drafter._ssd_session.counters.failures == 0


def test_padding_is_not_counted_as_verified(drafter):
    request = Request(max_tokens=3)
    assert prepare(drafter, request) == [[3, 1]]
    request.py_draft_tokens.extend([0, 0])
    request.tokens += [3, 5]
    prepare(drafter, request)
    counters = drafter._ssd_session.counters
    assert (counters.verified, counters.accepted) == (2, 1)


def test_a_paused_request_goes_on_and_a_cancelled_one_is_not_learned(drafter, monkeypatch):
    ends = []
    request = Request()
    step(drafter, request)
    session = drafter._ssd_session
    finish = session.finish
    monkeypatch.setattr(session, "finish", lambda *told: (ends.append(told[2].name), finish(*told)))
    drafter.free_resources(request)  # Paused: its pages are freed, and it is not finished.
    assert 1 in session
    step(drafter, request)
    request.is_finished = request.is_finished_due_to_cancellation = True
    drafter.free_resources(request)
    drafter.free_resources(request)
    assert ends == ["CANCELLED"]


def test_dummies_of_the_host_have_no_drafts(drafter):
    assert prepare(drafter, Request(0, is_attention_dp_dummy=True), Request(9, is_cuda_graph_dummy=True)) == [[], []]
    assert 0 not in drafter._ssd_session


def test_options_of_a_request():
    options = plugin.options_of(Request(max_tokens=7, cache_salt_id=3, lora_task_id=0))
    assert (options.max_tokens, options.salt, options.adapter) == (7, "3", "0")
    assert plugin.options_of(Request()) == RequestOptions(max_tokens=20)


def test_drafts_are_as_short_as_the_host_asks_for_as_it_runs(drafter):
    drafter.max_draft_len = 2
    assert prepare(drafter, Request()) == [[3, 1]]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("drafter_service.plugins.tensorrt_llm.version", lambda _: "1.9.0", "TensorRT-LLM 1.9.0 was not tested"),
        ("tensorrt_llm._utils.mpi_world_size", lambda: 2, "several ranks are not supported"),
    ],
)
def test_a_host_that_is_not_supported_has_no_drafts(drafter, log, monkeypatch, name, value, reason):
    monkeypatch.setattr(name, value)
    for _ in range(2):
        assert prepare(drafter, Request()) == [[]]
    request = Request(is_finished=True)
    drafter.free_resources(request)
    assert len(log) == 1
    assert reason in log[0]


def test_a_vocabulary_is_needed(drafter_class, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="give its vocab_size"):
        drafter_class("owner/model")
