"""Log-probabilities and usage in responses: names and bytes of tokens, alternatives, and texts that are scored."""

from itertools import pairwise

import numpy as np
import openai
import pytest
import torch

from engine.api.responses import TokenNames, completion_logprobs, prompt_offsets, usage
from engine.drafters.sources import DraftCounts
from engine.models.loader import load_model
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.sampling.logprobs import Logprobs
from engine.scheduling.request import Completion, FinishReason
from tests.engine.api.serving import KEY, MODEL
from tests.engine.forward import prompt_logits
from tests.strategies import array

EMOJI = "🦄🦄🦄🎉🎉"
SPECIAL = "<|endoftext|>"


@pytest.fixture
def complete(http):
    def complete(**fields):
        return http.post("/v1/completions", json={"model": MODEL} | fields).raise_for_status().json()["choices"]

    return complete


def text_of(entries):
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "seed"), [("Reply with the emoji 🦄", 1), (EMOJI, 2), (EMOJI, 3), ("é猫", 4), ("x = '🎉", 5)]
)
def test_the_bytes_of_a_chats_tokens_add_up_to_its_text(server, prompt, seed, stream):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
        given = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "seed": seed, "stream": stream}
        answer = client.chat.completions.create(**given, max_tokens=40, logprobs=True, top_logprobs=4, temperature=1.2)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    text = "".join((each.delta if stream else each.message).content or "" for each in choices)
    entries = [entry.model_dump() for each in choices if each.logprobs for entry in each.logprobs.content]
    assert text_of(entries) == text
    for entry in entries:
        assert len(entry["top_logprobs"]) == 4
        for each in (entry, *entry["top_logprobs"]):
            assert (
                each["token"] in (bytes(each["bytes"]).decode(errors="replace"), SPECIAL, "<tool_call>")
                or "\\x" in each["token"]
            )


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize(("prompt", "count"), [(EMOJI, 5), ("x = '🎉", 20), ("x", 1), ("x", 2)])
def test_the_sampled_token_and_all_alternatives_are_named(complete, prompt, count, echo):
    """Several tokens may have the same text, and the sampled one may be none of the likeliest."""
    for temperature in (0, 1.8):
        [choice] = complete(prompt=prompt, seed=4, temperature=temperature, logprobs=count, max_tokens=12, echo=echo)
        scores = choice["logprobs"]
        rows = list(zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True))[echo:]
        assert all(top[name] == value for name, value, top in rows)
        sizes = {len(top) for _, _, top in rows[-12:]}
        assert sizes == {count} if temperature == 0 else count + 1 in sizes <= {count, count + 1}


@pytest.mark.parametrize("echo", [False, True])
def test_no_alternatives_are_null(complete, echo):
    [choice] = complete(prompt="x y", logprobs=0, max_tokens=3, echo=echo)
    assert choice["logprobs"]["top_logprobs"] is None
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"])


@pytest.mark.parametrize("prompt", [f"{SPECIAL}def f():", [0, 4, 5], EMOJI, "a 猫 b", "\N{COMBINING ACUTE ACCENT}x"])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_an_echo_begins_with_the_prompt_and_offsets_divide_it(complete, prompt, max_tokens):
    [choice] = complete(prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0)
    tokenizer = Tokenizer(str(SHIPPED_MODEL))
    known = prompt if isinstance(prompt, str) else SPECIAL + tokenizer.decode(array(prompt))
    assert choice["text"].startswith(known)
    assert (choice["text"] == known) == (max_tokens == 0)
    scores = choice["logprobs"]
    bounds = [*scores["text_offset"], len(choice["text"])]
    parts = [choice["text"][start:end] for start, end in pairwise(bounds)]
    assert "".join(parts) == choice["text"]
    # Tokens that are parts of a character begin where it does; the last of them has its text.
    assert all(part == name or "\\x" in name for part, name in zip(parts, scores["tokens"], strict=True))


@pytest.mark.parametrize(
    ("text", "pieces", "expected"),
    [
        ("a b", [b"<s>", b" a", b" b"], [0, 0, 1]),  # The tokenizer adds a token and a space.
        ("a🦄", [b"a", b"\xf0\x9f", b"\xa6\x84"], [0, 1, 1]),
        ("a b", [b"a", b" b", b"</s>"], [0, 1, 3]),
        ("A b", [b"a", b" b"], [0, 1]),  # It normalizes the text.
    ],
)
def test_offsets_are_those_of_the_text_that_was_sent(text, pieces, expected):
    assert prompt_offsets(text, pieces) == expected


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_scored_text_has_the_log_probabilities_of_a_forward_pass(complete, max_tokens):
    """Evaluation harnesses score continuations in this way."""
    tokenizer = Tokenizer(SHIPPED_MODEL)
    texts = [f"{SPECIAL}def f(items):\n    return sorted(items)", f"import os\n# {EMOJI}\n"]
    prompts = [tokenizer.encode(text) for text in texts]
    given = {"prompt": [prompt.tolist() for prompt in prompts], "echo": True, "logprobs": 1, "temperature": 0}
    choices = complete(**given, max_tokens=max_tokens)
    model = load_model(SHIPPED_MODEL)
    for choice, text, prompt in zip(choices, texts, prompts, strict=True):
        expected = torch.log_softmax(prompt_logits(model, prompt), -1).numpy()
        scores = choice["logprobs"]
        assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
        values = scores["token_logprobs"][1 : len(prompt)]
        np.testing.assert_allclose(values, expected[np.arange(len(prompt) - 1), prompt[1:]], atol=1e-4)
        is_greedy = [value == max(top.values()) for value, top in zip(values, scores["top_logprobs"][1:], strict=False)]
        assert is_greedy == (expected.argmax(1)[:-1] == prompt[1:]).tolist()
        assert choice["text"].startswith(text)
        assert len(scores["tokens"]) == len(prompt) + max_tokens


def test_the_whole_context_window_can_be_scored(http, complete):
    window = http.get("/v1/models").json()["data"][0]["max_model_len"]
    [choice] = complete(prompt=[5] * window, echo=True, logprobs=1, max_tokens=0)
    assert len(choice["logprobs"]["token_logprobs"]) == window
    too_long = {"model": MODEL, "prompt": [5] * (window + 1), "echo": True, "max_tokens": 0}
    error = http.post("/v1/completions", json=too_long).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def completion(tokens, cached, **by_source):
    return Completion(
        np.zeros(tokens, np.uint32), FinishReason.LENGTH, 2, 3, 1, cached_tokens=cached,
        by_source={name: DraftCounts(*counts) for name, counts in by_source.items()}, predicted=DraftCounts(2, 1),
    )  # fmt: skip


def test_usage_counts_each_prompt_once_and_no_pages_cached_by_its_own_outputs():
    # In the order in which they ended.
    one, two = {"corpus": (3, 1)}, {"mtp": (2, 1), "corpus": (1, 0)}
    ended = {3: completion(4, 48, **one), 0: completion(1, 16, **two), 1: completion(2, 80), 2: completion(3, 32)}
    result = usage([100, 60], ended)
    assert (result["prompt_tokens"], result["completion_tokens"], result["total_tokens"]) == (160, 10, 170)
    assert result["prompt_tokens_details"] == {"cached_tokens": 16 + 32}
    assert result["completion_tokens_details"] == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 4}
    by_source = result["draft"].pop("by_source")
    assert result["draft"] == {"steps": 8, "drafted_tokens": 12, "accepted_tokens": 4, "tokens_per_step": 1.25}
    assert by_source == {
        "corpus": {"drafted_tokens": 4, "accepted_tokens": 1},
        "mtp": {"drafted_tokens": 2, "accepted_tokens": 1},
    }


def test_a_token_keeps_its_name_beside_others_of_the_same_text():
    class Names(TokenNames):
        def __init__(self):
            self._as_ids = False

        def name(self, token):
            return "a" if token < 3 else "b"

    logprobs = Logprobs(np.array([-3.0]), array([[1, 3, 2]]), np.array([[-0.5, -1.0, -2.0]]))
    [top] = completion_logprobs(array([2]), logprobs, Names(), [0])["top_logprobs"]
    assert top == {"token_id:1": -0.5, "b": -1.0, "a": -3.0}


def test_tokens_can_be_named_by_their_ids(complete, http):
    [choice] = complete(prompt=[5, 6], logprobs=2, max_tokens=2, echo=True, return_tokens_as_token_ids=True)
    assert choice["logprobs"]["tokens"][:2] == ["token_id:5", "token_id:6"]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"][1:] for name in top)
