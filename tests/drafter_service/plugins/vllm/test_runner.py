"""vLLM's worker and V2 model runner with drafts, over stand-ins that are made of the host's recorded signatures.

`test_conformance.py` has the tests with the host's own classes.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch

import drafter_service.plugins.vllm as plugin
from drafter_service.plugins.vllm import runner, speculator, worker
from drafter_service.plugins.vllm.variants import Choice, Variant
from tests.drafter_service.plugins import signatures

MAX_DRAFT = 4
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _host(monkeypatch):
    signatures.stand_in(signatures.load("vllm"), monkeypatch)
    for made in (worker.worker_class, runner.runner_class, runner.null_speculator_class):
        made.cache_clear()
    # What the host's own initialization sets.
    initialize = "vllm.v1.worker.gpu.model_runner.GPUModelRunner.__init__"
    monkeypatch.setattr(initialize, lambda self, *_: setattr(self, "num_speculative_steps", MAX_DRAFT))
    yield
    for made in (worker.worker_class, runner.runner_class, runner.null_speculator_class):
        made.cache_clear()


def make_runner():
    made = runner.runner_class()(SimpleNamespace(), CPU)
    made.device = CPU
    made.req_states = SimpleNamespace(
        req_id_to_index={"a": 2, "b": 0},
        num_speculative_steps=MAX_DRAFT,
        draft_tokens=torch.full((3, MAX_DRAFT), 9),
    )
    return made


def test_methods_accept_what_the_host_calls_them_with():
    recorded = signatures.load("vllm")
    for ours, theirs in (
        (worker.worker_class(), recorded["vllm.v1.worker.gpu_worker"]["Worker"]),
        (runner.runner_class(), recorded["vllm.v1.worker.gpu.model_runner"]["GPUModelRunner"]),
    ):
        for name in theirs.keys() & vars(ours).keys():
            assert signatures.signature_text(vars(ours)[name]) == theirs[name]
    propose = recorded["vllm.v1.worker.gpu.spec_decode.speculator"]["BaseSpeculator"]["propose"]
    parameters = inspect.signature(signatures.stand_in_member("propose", propose)).parameters
    batch = SimpleNamespace(num_reqs=2)
    proposed = make_runner().speculator.propose(batch, *[None] * (len(parameters) - 2))
    assert proposed.tolist() == [[0] * MAX_DRAFT] * 2
    assert proposed.dtype == torch.int64


def test_the_drafts_of_a_step_are_written_to_the_rows_of_their_requests():
    made = make_runner()
    made.update_requests(SimpleNamespace(scheduled_spec_decode_tokens={"a": [5, 6], "b": [-1, -1, -1, -1]}))
    assert made.req_states.draft_tokens.tolist() == [[0, 0, 0, 0], [9, 9, 9, 9], [5, 6, 0, 0]]
    made.update_requests(SimpleNamespace(scheduled_spec_decode_tokens={}))
    assert made.req_states.draft_tokens[2].tolist() == [5, 6, 0, 0]


def test_the_host_asks_the_speculator_for_nothing_else():
    speculator = make_runner().speculator
    assert not speculator.supports_mm_inputs
    assert speculator.draft_logits is None
    speculator.init_cudagraph_manager(None)
    speculator.capture()


@pytest.mark.parametrize("variant", list(Variant))
def test_the_worker_runs_the_variant_that_was_chosen(monkeypatch, variant):
    monkeypatch.setattr(worker, "choose", lambda _: Choice(variant, ""))
    monkeypatch.setattr(speculator, "runner_class", lambda: lambda *_: "speculating")
    drafting = plugin.Worker()
    drafting.vllm_config, drafting.device = SimpleNamespace(), CPU
    made = drafting._make_model_runner()  # The stand-in of the host's method returns None.
    assert isinstance(made, runner.runner_class()) == (variant is Variant.V2_SCHEDULER)
    assert (made == "speculating") == (variant is Variant.V2_WORKER)
