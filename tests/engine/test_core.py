"""The engine's loop: outputs equal the target's, with any drafter and in any batch."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.engine import build_engine
from engine.executor.kv_memory import default_kv_memory
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.sampling.logprobs import compute_logprobs
from engine.sampling.noise import greedy_tokens
from engine.scheduling.request import FinishReason, Request, SamplingParams
from engine.speculation import verify
from ssd.baselines.ngram import NgramDrafter
from ssd.baselines.none import NoDrafter
from ssd.errors import UserError
from tests.engine.conftest import make_folder
from tests.engine.forward import cached_and_fresh, prompt_logits
from tests.engine.integrity import check_integrity

CONFIG = EngineConfig(max_sequences=8, max_step_tokens=256, max_draft=6)


def requests(count, *, temperature=0.0, max_tokens=40):
    rng = np.random.default_rng(3)
    return [
        Request(
            rng.integers(1, 60, rng.integers(1, 90)).astype(np.uint32),
            SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed),
        )
        for seed in range(count)
    ]


def outputs(engine, submitted):
    """Outputs of all requests run together, with integrity checked after every step."""
    completions = engine.generate(submitted, observe=lambda _: check_integrity(engine.scheduler))
    assert engine.scheduler.pages.free_count == engine.scheduler.pages.count
    return [completion.tokens.tolist() for completion in completions]


def test_greedy_output_equals_that_of_transformers(tmp_path):
    reference = make_folder(tmp_path)
    engine = build_engine(load_model(tmp_path), CONFIG, NoDrafter())
    for request in requests(4):
        prompt = torch.from_numpy(request.prompt.astype(np.int64))[None]
        with torch.inference_mode():
            expected = reference.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)[0]
        assert outputs(engine, [request])[0] == expected[prompt.shape[1] :].tolist()


def test_prompts_with_log_probabilities_are_computed_again(model):
    prompt = np.arange(1, 60, dtype=np.uint32)
    engine = build_engine(model, CONFIG, NoDrafter())
    scored, first, second = (
        engine.generate([Request(prompt, SamplingParams(max_tokens=2, prompt_logprobs=count))])[0]
        for count in (0, None, 0)
    )
    assert (first.cached_tokens > 0, second.cached_tokens) == (True, 0)
    assert len(second.prompt_logprobs.tokens) == len(prompt) - 1
    np.testing.assert_allclose(second.prompt_logprobs.tokens, scored.prompt_logprobs.tokens, atol=1e-5)


def test_generate_refuses_all_requests_if_one_is_invalid(model):
    engine = build_engine(model, CONFIG, NoDrafter())
    with pytest.raises(UserError, match="empty"):
        engine.generate([*requests(2), Request(np.empty(0, np.uint32))])
    assert not engine.scheduler.has_work


@pytest.mark.parametrize(("settings", "lines"), [({}, 0), ({"draft_shape": "tree"}, 1)])
def test_steps_that_cannot_be_launched_ahead_are_reported(model, settings, lines):
    notes = []
    build_engine(model, replace(CONFIG, in_flight=1, **settings), NoDrafter(), notify=notes.append)
    assert ["because drafts are trees" in note for note in notes] == [True] * lines


def test_a_small_cache_limits_the_context_window(model, monkeypatch):
    monkeypatch.setattr("engine.executor.build.page_count", lambda *_: 2)
    engine = build_engine(model, EngineConfig(max_sequences=1, max_draft=0, kv_memory_mib=2), NoDrafter())
    size = model.config.max_positions
    cause = f"32 tokens (as many as --kv-memory 2 holds; {2 * size // 32} would hold the model's {size})"
    assert str(engine.window) == cause
    [completion] = engine.generate([Request(np.ones(30, np.uint32), SamplingParams(max_tokens=9, ignore_eos=True))])
    assert (len(completion.tokens), completion.finish_reason) == (2, FinishReason.LENGTH)
    with pytest.raises(UserError, match=re.escape(f"the prompt has 32 tokens; the context window of {cause} must")):
        engine.add(Request(np.ones(32, np.uint32)))


@pytest.mark.parametrize(("available", "mib"), [(1 << 40, 1024), (1 << 30, 512), (1 << 10, 1)])
def test_the_default_cache_holds_a_context_window_but_takes_half_of_the_free_memory_at_most(available, mib):
    config = EngineConfig(page_size=16)
    assert default_kv_memory(1 << 19, config, 32_768, available) == mib
    assert default_kv_memory(1 << 19, config, 512, available) == min(256, mib)


@pytest.mark.parametrize("size", [40, 512])
def test_a_request_without_an_output_scores_its_prompt(model, size):
    """The prompt may fill the whole context window."""
    engine = build_engine(model, EngineConfig(max_sequences=2, max_step_tokens=64, max_draft=4), NgramDrafter())
    prompt = np.random.default_rng(0).integers(1, model.config.vocab_size, size).astype(np.uint32)
    scored = Request(prompt, SamplingParams(max_tokens=0, prompt_logprobs=1))
    completion, other = engine.generate([scored, Request(prompt[:20])])
    assert (len(completion.tokens), completion.finish_reason, completion.steps) == (0, FinishReason.LENGTH, 0)
    assert len(other.tokens) > 0
    expected = compute_logprobs(prompt_logits(model, prompt)[:-1], prompt[1:], 1)
    np.testing.assert_allclose(completion.prompt_logprobs.tokens, expected.tokens, atol=1e-4)
    check_integrity(engine.scheduler)
    assert engine.scheduler.pages.free_count == engine.scheduler.pages.count


def test_only_drafts_that_continue_a_prediction_count_as_predicted(model):
    engine = build_engine(model, CONFIG, NgramDrafter())
    output = np.tile(np.arange(5, 12, dtype=np.uint32), 6)
    unrelated = np.arange(12, 40, dtype=np.uint32)
    request = Request(output, SamplingParams(max_tokens=len(output)), recorded=output)
    plain, other, right = engine.generate([replace(request, hints=hints) for hints in (None, unrelated, output)])
    # The prompt has the same text, so all are drafted from.
    assert min(plain.accepted, other.accepted) > 20
    assert plain.predicted == other.predicted == (0, 0)
    assert 20 < right.predicted.accepted == right.accepted
    assert right.predicted.accepted <= right.predicted.drafted <= right.drafted


def test_steps_of_recorded_outputs_sample_as_others_do(model, monkeypatch):
    """Steps of recorded outputs take as long as others, because they sample too."""
    calls = []
    monkeypatch.setattr(verify, "greedy_tokens", lambda logits: (calls.append(1), greedy_tokens(logits))[1])
    recorded = np.arange(1, 21, dtype=np.uint32)
    engine = build_engine(model, CONFIG, NoDrafter())
    [completion] = engine.generate([Request(recorded[:3], SamplingParams(max_tokens=20), recorded=recorded)])
    assert completion.tokens.tolist() == recorded.tolist()
    assert len(calls) >= completion.steps == 20


@pytest.mark.parametrize("has_budget", [False, True])
def test_a_cache_without_a_page_is_refused(model, has_budget):
    config = EngineConfig(max_sequences=1, page_size=1 << 20, kv_memory_mib=1)
    with pytest.raises(UserError, match=r"--kv-memory 1: a page .* takes \d+ MiB"):
        build_engine(model, config, NoDrafter(), has_budget=has_budget)


@pytest.mark.parametrize(
    "setting", [{"max_sequences": 0}, {"page_size": 0}, {"kv_memory_mib": 0}, {"max_draft": -1}, {"max_step_tokens": 9}]
)
def test_engine_settings_out_of_range_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        EngineConfig(**setting)


def sharing_requests():
    """Make 10 greedy requests whose prompts share starts of 0 to 60 tokens."""
    rng = np.random.default_rng(11)
    stem = rng.integers(1, 60, 60)
    return [
        Request(
            np.concatenate([stem[: rng.integers(0, 61)], rng.integers(1, 60, rng.integers(1, 20))]).astype(np.uint32),
            SamplingParams(max_tokens=int(rng.integers(20, 50)), temperature=0.0, seed=seed),
        )
        for seed in range(10)
    ]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of PyTorch has no oneDNN")
def test_cached_keys_and_values_equal_recomputed_ones_bitwise(model_folder):
    """Covers pages computed in chunks, token by token, with partly right drafts, and after other cached pages."""
    submitted = sharing_requests()
    packed = pack(load_model(model_folder))
    engine = build_engine(packed, replace(CONFIG, kv_memory_mib=1), NgramDrafter())
    pool = engine.scheduler.pages
    pool.allocate(pool.count - 100)
    completions = [*engine.generate(submitted[:5]), *engine.generate(submitted[5:])]
    assert sum(completion.cached_tokens for completion in completions[1:5]) > 0
    pages = [
        page
        for request, completion in zip(submitted, completions, strict=True)
        for page in cached_and_fresh(packed, engine, np.concatenate([request.prompt, completion.tokens]))
    ]
    assert len(pages) > 30
    assert all(torch.equal(cached, fresh) for cached, fresh in pages)
