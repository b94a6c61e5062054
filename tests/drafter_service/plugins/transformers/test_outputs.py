"""Outputs of the plug-in against plain `generate`, with the shipped model and with tiny random ones.

One sequence is decoded by the host's loop, and batches by the plug-in's own, which most tests are of.
"""

import itertools
import random

import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MistralConfig,
    MistralForCausalLM,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
)
from transformers.cache_utils import QuantizedLayer

from drafter_service.plugins.transformers import SsdGenerate, batch
from drafter_service.plugins.transformers.batch import RowCache
from tests.drafter_service.plugins.helpers import corpus_of, session_of
from tests.drafter_service.plugins.transformers.generation import PROMPTS, TOKENS, generated

VOCAB = 8
SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 1.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LENGTH = 3
"""Number of tokens of a sampled output."""
TEMPERATURE = 3.0
SIGNIFICANCE = 1e-6
"""Least p-value of outputs that fit."""


@pytest.fixture
def inputs(tokenizer):
    """Return the prompts, which differ in length, as a batch that is padded on the left."""
    tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    assert len(set(batch.attention_mask.sum(dim=1).tolist())) > 1
    return {**batch, "pad_token_id": 1}


@pytest.fixture(params=["one", "batch"])
def one_or_batch(request, tokenizer, inputs):
    """Return one prompt, which the host's own assisted decoding decodes, or the batch."""
    return inputs if request.param == "batch" else {**tokenizer(PROMPTS[:1], return_tensors="pt"), "pad_token_id": 1}


def outputs(model, inputs, **arguments):
    """Return the output of `generate` as a list of lists."""
    return generated(model, inputs["input_ids"], **{**inputs, "input_ids": None, **arguments})


def tiny(model_class=LlamaForCausalLM, config_class=LlamaConfig, **settings):
    """Return a small random model."""
    torch.manual_seed(1)
    return model_class(config_class(**SIZE, **settings)).eval()


def test_outputs_are_identical_and_take_fewer_steps_the_second_time(model, untimed, one_or_batch):
    ssd, plain, steps = untimed, outputs(model, one_or_batch), []
    for _ in range(2):
        before = ssd.counters.steps
        assert outputs(model, one_or_batch, custom_generate=ssd) == plain
        steps.append(ssd.counters.steps - before)
        corpus_of(session_of(ssd))
    assert steps[1] <= TOKENS * len(plain) / 3
    assert steps[0] > steps[1]
    assert ssd.counters.accepted + ssd.counters.steps == 2 * TOKENS * len(plain)
    assert session_of(ssd).running == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.3, "return_dict_in_generate": True, "max_time": 1000.0},
        {"no_repeat_ngram_size": 3, "min_new_tokens": 10, "eos_token_id": list(range(200, 1200))},
        {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
        {"max_new_tokens": 1},
        {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": list(range(200, 1200))},
        {"forced_eos_token_id": 0},
        {"top_h": 1e-6, "do_sample": True},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_outputs_are_identical_with_options_of_the_host(model, ssd, one_or_batch, arguments):
    plain = outputs(model, one_or_batch, **arguments)
    for _ in range(2):
        assert outputs(model, one_or_batch, custom_generate=ssd, **arguments) == plain
        corpus_of(session_of(ssd))
    assert ssd.counters.steps > 0


def test_rows_that_end_at_different_steps_are_padded(model, ssd, inputs):
    """Each row ends at another end token, the first of which is in the middle of a draft."""
    plain = outputs(model, inputs)
    width = inputs["input_ids"].shape[1]
    ends = [row[width + at] for row, at in zip(plain, (2, 5, 11), strict=True)]
    for _ in range(2):
        ended = outputs(model, inputs, custom_generate=ssd, eos_token_id=ends)
        assert ended == outputs(model, inputs, eos_token_id=ends)
        corpus_of(session_of(ssd))
    lengths = [len(row) - row.count(inputs["pad_token_id"]) for row in ended]
    assert len(set(lengths)) == len(lengths)
    assert len(ended[0]) < len(plain[0])


def test_stop_strings_end_each_row_at_its_token(model, tokenizer, ssd, inputs):
    plain = outputs(model, inputs)
    width = inputs["input_ids"].shape[1]
    strings = [tokenizer.decode(row[width + at : width + at + 2]) for row, at in zip(plain, (2, 5, 9), strict=True)]
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, strings)])
    stopped = outputs(model, inputs, stopping_criteria=criteria)
    assert stopped != plain
    for _ in range(2):
        assert outputs(model, inputs, custom_generate=ssd, stopping_criteria=criteria) == stopped
        corpus_of(session_of(ssd))
    assert ssd.counters.accepted > 0


@pytest.mark.parametrize("tokens", [-5, 11, TOKENS + 6])
def test_a_length_of_the_caller_replaces_that_of_the_call(model, ssd, one_or_batch, tokens):
    criteria = StoppingCriteriaList([MaxLengthCriteria(one_or_batch["input_ids"].shape[1] + tokens)])
    plain = outputs(model, one_or_batch, stopping_criteria=criteria)
    assert len(plain[0]) == one_or_batch["input_ids"].shape[1] + max(tokens, 1)
    for _ in range(2):
        assert outputs(model, one_or_batch, custom_generate=ssd, stopping_criteria=criteria) == plain
        corpus_of(session_of(ssd))
    assert ssd.counters.steps > 0


@pytest.mark.parametrize("as_tensor", [int, torch.tensor])
def test_end_tokens_of_the_caller_replace_those_of_the_model(model, ssd, one_or_batch, as_tensor):
    """The end token is in the middle of a draft."""
    width = one_or_batch["input_ids"].shape[1]
    end = outputs(model, one_or_batch)[0][width + 5]
    criteria = StoppingCriteriaList([EosTokenCriteria(as_tensor(end))])
    outputs(model, one_or_batch, custom_generate=ssd)
    corpus_of(session_of(ssd))
    plain = outputs(model, one_or_batch, stopping_criteria=criteria)
    assert plain[0].index(end, width) <= width + 5
    assert outputs(model, one_or_batch, custom_generate=ssd, stopping_criteria=criteria) == plain
    assert ssd.counters.accepted > 0


def test_a_time_limit_ends_all_rows(model, ssd, inputs):
    ended = outputs(model, inputs, custom_generate=ssd, max_time=0.0)
    width, pad = inputs["input_ids"].shape[1], inputs["pad_token_id"]
    plain = outputs(model, inputs)
    for row, whole in zip(ended, plain, strict=True):
        tokens = [token for token in row[width:] if token != pad]
        assert tokens
        assert tokens == whole[width : width + len(tokens)]
    assert ssd.counters.steps <= len(PROMPTS)


def test_wrong_drafts_change_nothing(model, ssd, inputs, monkeypatch):
    plain = outputs(model, inputs)
    continuation = dict(enumerate(row[inputs["input_ids"].shape[1] :] for row in plain))
    draft = session_of(ssd).draft

    def draft_wrongly(texts, **arguments):
        draft(texts, **arguments)
        places = [len(text) - session_of(ssd)._requests[at].prompt_length for at, text in texts]
        right = [continuation[at][place : place + 3] for (at, _), place in zip(texts, places, strict=True)]
        return [
            [token + 1 for token in tokens[: TOKENS - place - 1]] for tokens, place in zip(right, places, strict=True)
        ]

    monkeypatch.setattr(session_of(ssd), "draft", draft_wrongly)
    assert outputs(model, inputs, custom_generate=ssd) == plain
    assert ssd.counters.accepted == 0
    assert ssd.counters.steps == TOKENS * len(PROMPTS)


@pytest.mark.parametrize(("attention", "seed"), [("sdpa", 0), ("sdpa", 1), ("eager", 2)])
def test_drafts_of_any_length_that_are_right_up_to_any_token(monkeypatch, attention, seed):
    """Rows diverge, so that the cache has holes, is compacted and loses rows."""
    compactions = []
    compact = RowCache._compact
    monkeypatch.setattr(RowCache, "_compact", lambda *arguments: compactions.append(compact(*arguments)))
    model, chance, tokens = tiny(attn_implementation=attention), random.Random(seed), 60
    ids = torch.tensor([[chance.randrange(VOCAB) for _ in range(9)] for _ in range(5)])
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 8, 3, 3, 5)):
        mask[row, :padding] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": tokens}
    plain = outputs(model, inputs)
    continuation = [row[9:] for row in plain]

    def any_draft(texts, **_):
        drafts = []
        for at, text in texts:
            place = len(text) - int(mask[at].sum())
            draft = continuation[at][place : place + chance.randrange(9)][: tokens - place - 1]
            right = chance.randrange(9)
            drafts.append(draft[:right] + [chance.randrange(VOCAB) for _ in draft[right:]])
        return drafts

    with SsdGenerate(model, sidecar="embedded", capacity=20_000) as ssd:
        monkeypatch.setattr(session_of(ssd), "draft", any_draft)
        assert outputs(model, inputs, custom_generate=ssd) == plain
    assert compactions


def sampled(model, rows, calls):
    """Return the counts of sampled outputs, and how many draft tokens were accepted and rejected."""
    inputs, width = torch.tensor([[5, 2, 5, 2, 5]] * rows), 5
    counts = torch.zeros([VOCAB] * LENGTH)
    with SsdGenerate(model, sidecar="embedded", capacity=20_000) as ssd:
        session_of(ssd).record_step = lambda *_: None  # Durations of steps decide how much is drafted.
        for seed in range(calls):
            torch.manual_seed(seed)
            sampling = {"do_sample": True, "top_k": 3, "temperature": TEMPERATURE}
            result = model.generate(inputs, max_new_tokens=LENGTH, **sampling, custom_generate=ssd)
            for row in result[:, width:].tolist():
                counts[tuple(row)] += 1
        counters = ssd.counters
    return counts, counters.accepted, counters.verified - counters.accepted


def probabilities(model):
    """Return the probability of each output, float64 [VOCAB] * LENGTH."""
    result = torch.zeros([VOCAB] * LENGTH, dtype=torch.float64)
    for output in itertools.product(range(VOCAB), repeat=LENGTH):
        with torch.no_grad():
            logits = model(torch.tensor([[5, 2, 5, 2, 5, *output[:-1]]])).logits[0, -LENGTH:].double() / TEMPERATURE
        least = logits.topk(3).values[:, -1:]
        p = logits.masked_fill(logits < least, -torch.inf).softmax(dim=-1)
        result[output] = p[range(LENGTH), output].prod()
    return result


def p_value(model, rows, calls):
    """Return the p-value of a chi-square test of sampled outputs."""
    counts, accepted, rejected = sampled(model, rows, calls)
    assert min(accepted, rejected) > 20
    expected = probabilities(model) * counts.sum()
    if counts[expected == 0].sum():
        return 0.0
    is_rare = expected < 5
    joined = [torch.cat((each[~is_rare], each[is_rare].sum()[None])) for each in (counts.double(), expected)]
    return chisquare(*(each[joined[1] > 0].numpy() for each in joined)).pvalue


@pytest.mark.parametrize(("rows", "calls"), [(1, 120), (80, 8)])
def test_sampled_outputs_follow_the_target_distribution(rows, calls):
    assert p_value(tiny(), rows, calls) > SIGNIFICANCE


def test_the_test_of_the_distribution_finds_a_fault(monkeypatch):
    """Here a row keeps tokens that were sampled after a draft token that it did not sample."""
    monkeypatch.setattr(batch, "common_length", lambda draft, chosen: len(draft))
    assert p_value(tiny(), 80, 8) < SIGNIFICANCE


def test_sampled_outputs_without_drafts_are_identical(model, ssd, one_or_batch):
    plain = outputs(model, one_or_batch, do_sample=True)
    assert outputs(model, one_or_batch, do_sample=True, custom_generate=ssd, ssd_max_draft=0) == plain
    assert ssd.counters.drafted == 0


def test_each_row_has_a_session_of_its_own(model, ssd, inputs, monkeypatch):
    names = []
    start = session_of(ssd).start

    def start_named(at, text, options, extras):
        names.append(extras["ssd_session"])
        start(at, text, options, extras)

    monkeypatch.setattr(session_of(ssd), "start", start_named)
    outputs(model, inputs, custom_generate=ssd, ssd_session="chat")
    assert names == ["chat/0", "chat/1", "chat/2"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("ssd_max_draft", 2.5),
        ("ssd_session", "\ud800"),
        ("ssd_session", 5),
        ("ssd_private", "no"),
        ("cache_salt", "\ud800"),
        ("cache_salt", 5),
        ("hints", 5),
    ],
)
def test_an_option_of_a_wrong_type_costs_the_drafts_of_its_call(model, ssd, log, one_or_batch, option, value):
    plain = outputs(model, one_or_batch)
    assert outputs(model, one_or_batch, custom_generate=ssd, **{option: value}) == plain
    assert ssd.counters.steps == 0
    assert len(log) == 1
    assert option in log[0]
    assert corpus_of(session_of(ssd)).tokens == 0


@pytest.mark.parametrize("convert", [list, tuple, torch.tensor, None])
def test_hints_are_a_sequence_of_tokens(model, untimed, one_or_batch, convert):
    plain = outputs(model, one_or_batch)
    hints = convert and convert(plain[0][one_or_batch["input_ids"].shape[1] :])
    assert outputs(model, one_or_batch, custom_generate=untimed, hints=hints) == plain
    assert untimed.counters.steps > 0
    assert convert is None or untimed.counters.accepted > TOKENS / 2


def test_hints_may_be_a_text(model, ssd, log, one_or_batch):
    assert outputs(model, one_or_batch, custom_generate=ssd, hints="def quicksort") == outputs(model, one_or_batch)
    assert log == []


def test_rows_of_a_call_that_fails_are_not_learned(model, ssd, inputs):
    steps = itertools.count()

    def fail(*_):
        if next(steps) == 2:
            raise RuntimeError("out of memory")

    hook = model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        outputs(model, inputs, custom_generate=ssd)
    hook.remove()
    assert session_of(ssd).running == 0
    assert corpus_of(session_of(ssd)).tokens == 0


class Nothing(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def every_seventh(ids, scores, **_):
    return torch.full((len(ids),), ids.shape[1] % 7 == 2)


@pytest.mark.parametrize(
    ("one_or_batch", "reason", "arguments"),
    [
        ("batch", "beam search", {"num_beams": 2}),
        ("batch", "KV cache is needed", {"use_cache": False}),
        ("batch", "static KV caches", {"cache_implementation": "static"}),
        ("batch", "logits processor Nothing", {"logits_processor": LogitsProcessorList([Nothing()])}),
        ("batch", "logits processor PrefixConstrained", {"prefix_allowed_tokens_fn": lambda row, _: [row, 5]}),
        ("one", "logits processor Nothing", {"logits_processor": LogitsProcessorList([Nothing()])}),
        ("one", "logits processor PrefixConstrained", {"prefix_allowed_tokens_fn": lambda row, _: [row, 5]}),
        ("one", "logits processor SynthID", {"watermarking_config": SynthIDTextWatermarkingConfig(5, [1, 2])}),
        ("one", "logits processor UnbatchedClassifierFree", {"guidance_scale": 1.5}),
        ("batch", "stopping criterion function", {"stopping_criteria": [every_seventh]}),
        ("one", "stopping criterion function", {"stopping_criteria": [every_seventh]}),
        ("batch", "scores and states", {"return_dict_in_generate": True, "output_scores": True}),
        ("batch", "without an end token", {"eos_token_id": None, "max_time": 1000.0}),
    ],
    indirect=["one_or_batch"],
)
def test_unsupported_requests_are_decoded_without_drafts(model, ssd, log, one_or_batch, reason, arguments):
    arguments = {"max_new_tokens": 3, **arguments}
    plain = outputs(model, one_or_batch, **arguments)
    for _ in range(2):
        assert outputs(model, one_or_batch, custom_generate=ssd, **arguments) == plain
    assert ssd.counters.steps == 0
    assert len(log) == 1
    assert reason in log[0]


def test_a_cache_of_the_caller_is_left_as_the_host_leaves_it(model, ssd, log, inputs):
    caches = DynamicCache(config=model.config), DynamicCache(config=model.config)
    plain = outputs(model, inputs, past_key_values=caches[0])
    assert outputs(model, inputs, past_key_values=caches[1], custom_generate=ssd) == plain
    assert torch.equal(caches[0].layers[0].keys, caches[1].layers[0].keys)
    assert "caller" in log[0]


class Quantized(QuantizedLayer):
    """A layer of a backend that needs no library, without loss."""

    def __init__(self):
        super().__init__(residual_length=4)

    def _quantize(self, tensor, axis):
        return tensor.clone()

    def _dequantize(self, tensor):
        return tensor


def test_quantized_caches_are_decoded_without_drafts(model, ssd, log, one_or_batch):
    def generated_with_cache(**arguments):
        cache = DynamicCache()
        cache.layers, cache.layer_class_to_replicate = (
            [Quantized() for _ in range(model.config.num_hidden_layers)],
            None,
        )
        return outputs(model, one_or_batch, past_key_values=cache, **arguments)

    assert generated_with_cache(custom_generate=ssd) == generated_with_cache()
    assert ssd.counters.steps == 0
    assert "KV caches with Quantized are not" in log[0]


def test_padding_on_the_right_is_decoded_without_drafts(model, ssd, log, inputs):
    right = {**inputs, "attention_mask": inputs["attention_mask"].flip(1)}
    assert outputs(model, right, custom_generate=ssd) == outputs(model, right)
    assert "not padded on the left" in log[0]


def test_sliding_windows_are_decoded_without_drafts(log):
    model = tiny(MistralForCausalLM, MistralConfig, sliding_window=4)
    ids = torch.tensor([[5, 2, 5, 2, 5, 1], [1, 2, 3, 4, 5, 6]])
    with SsdGenerate(model, sidecar="embedded", capacity=20_000) as ssd:
        assert generated(model, ids, custom_generate=ssd) == generated(model, ids)
        assert ssd.counters.steps == 0
    assert "DynamicSlidingWindowLayer" in log[0]
