"""The plug-in for llama-cpp-python over a twin of the host's loop, with modules in place of the host's.

`tests/hosts/test_llama_cpp.py` runs it in the host.
"""

from abc import ABC

import numpy as np
import pytest

from drafter_service.client.identity import model_identity
from drafter_service.plugins.llama_cpp import LOG, TESTED, SsdDraftModel, model_of
from tests.drafter_service.plugins.helpers import corpus_of, plain, session_of, stand_in, target, use_equal_steps

VOCAB_SIZE = 50
CONTEXT = 80
PROMPTS = [[1, 2, 3], [4, 5, 6, 1, 2, 3, 4, 5, 6], [2, 2]]


class TwinLlama:
    """The host's loop over steps, with the calls of its draft model in the same places, around the target."""

    model, model_path, draft_model, steps, _logits_all = None, "/models/tiny.gguf", None, 0, True

    def __init__(self):
        self.input_ids = np.zeros(CONTEXT, np.intc)
        self.metadata = {"general.architecture": "llama", "llama.block_count": "2"}

    def n_vocab(self):
        return VOCAB_SIZE

    def n_ctx(self):
        return CONTEXT

    def generate(self, tokens):
        tokens = list(tokens)
        size, sample_at = 0, len(tokens) - 1
        while True:
            assert size + len(tokens) <= CONTEXT
            assert all(0 <= token < VOCAB_SIZE for token in tokens)
            self.steps += 1
            self.input_ids[size : size + len(tokens)] = tokens
            size += len(tokens)
            while sample_at < size:
                token = target(self.input_ids[: sample_at + 1])
                sample_at += 1
                yield token
                tokens = [token]
                if sample_at < size and token != self.input_ids[sample_at]:
                    size = sample_at
                    break
            self.input_ids[size] = tokens[0]
            tokens.extend(self.draft_model(self.input_ids[: size + 1]).astype(int)[: CONTEXT - size - 1])


@pytest.fixture
def llama(monkeypatch):
    """Return a `Llama` that runs the target."""
    functions = {
        "__version__": TESTED[0],
        "LLAMA_VOCAB_TYPE_NONE": 0,
        "llama_model_get_vocab": lambda model: model,
        "llama_vocab_type": lambda _: 2,
        "llama_vocab_get_text": lambda _, token: b"%d" % token,
    }
    speculative = {"LlamaDraftModel": type("LlamaDraftModel", (ABC,), {})}
    stand_in({"llama_cpp": functions, "llama_cpp.llama_speculative": speculative}, monkeypatch)
    return TwinLlama()


@pytest.fixture
def ssd(llama, monkeypatch):
    use_equal_steps(monkeypatch, "step_clock")
    with SsdDraftModel(llama, sidecar="embedded", capacity=20_000, max_draft=8) as ssd:
        llama.draft_model = ssd
        yield ssd
        assert ssd.counters.failures == 0


@pytest.fixture
def log(caplog):
    caplog.set_level("WARNING", LOG.logger.name)
    return caplog


def generated(llama, prompt, tokens=30):
    return [token for token, _ in zip(llama.generate(prompt), range(tokens), strict=False)]


def test_outputs_are_those_without_drafts(llama, ssd):
    steps = []
    for _ in range(2):
        before = llama.steps
        assert [generated(llama, prompt) for prompt in PROMPTS] == [plain(prompt) for prompt in PROMPTS]
        steps.append(llama.steps - before)
        corpus_of(session_of(ssd))
    assert steps[1] < steps[0] < 30 * len(PROMPTS)


def test_a_request_is_one_sequence_and_the_next_one_ends_it(llama, ssd, monkeypatch):
    started, finished = [], []
    start, finish = session_of(ssd).start, session_of(ssd).finish
    monkeypatch.setattr(session_of(ssd), "start", lambda *told: (started.append(list(told[1])), start(*told)))
    monkeypatch.setattr(session_of(ssd), "finish", lambda *told: (finished.append(list(told[1])), finish(*told)))
    texts = [prompt + generated(llama, prompt) for prompt in [*PROMPTS, PROMPTS[-1]]]
    ssd.close()
    assert [text[: len(begun)] for begun, text in zip(started, texts, strict=True)] == started
    assert [text[: len(ended)] for ended, text in zip(finished, texts, strict=True)] == finished
    # The host does not tell the tokens after the last draft.
    assert all(len(text) - len(ended) <= 9 for ended, text in zip(finished, texts, strict=True))


def test_the_next_turn_of_a_conversation_is_a_new_request(llama, ssd):
    turn = PROMPTS[0] + generated(llama, PROMPTS[0])
    assert generated(llama, [*turn, 20, 21]) == plain([*turn, 20, 21])
    assert (corpus_of(session_of(ssd)).requests, session_of(ssd).running) == (1, 1)


def test_drafts_end_with_the_context_window(llama, ssd):
    tokens = CONTEXT - len(PROMPTS[0]) - 1
    for _ in range(2):
        assert generated(llama, PROMPTS[0], tokens) == plain(PROMPTS[0], tokens)
        corpus_of(session_of(ssd))


def test_drafts_are_arrays_of_the_hosts_type(llama, ssd):
    # No kernel is compiled in the first request.
    assert session_of(ssd).namespaces.opened["", ""].drafter is not None
    draft = ssd(np.array([1, 2, 3, 1, 2], np.intc))
    assert draft.dtype == np.intc
    assert draft[0] == 3
    assert ssd(np.array([-1, 2], np.intc)).tolist() == []


def test_an_untested_version_has_no_drafts(llama, log, monkeypatch):
    monkeypatch.setattr("llama_cpp.__version__", "0.1")
    with SsdDraftModel(llama, sidecar="embedded", capacity=20_000) as ssd:
        llama.draft_model = ssd
        assert generated(llama, PROMPTS[0]) == plain(PROMPTS[0])
        assert ssd.counters.steps == 0
    assert log.messages == ["ssd-drafter: llama-cpp-python 0.1 was not tested, only 0.3.36; continuing without drafts"]


@pytest.mark.parametrize("kind", ["_is_recurrent", "_is_hybrid"])
def test_models_that_cannot_take_tokens_back_have_no_drafts(llama, log, monkeypatch, kind):
    monkeypatch.setattr(llama, kind, True, raising=False)
    with SsdDraftModel(llama, sidecar="embedded", capacity=20_000) as ssd:
        assert ssd(np.array([1, 2, 3, 1, 2], np.intc)).tolist() == []
        assert ssd.counters.steps == 0
    (line,) = log.messages
    assert line.endswith("a recurrent or hybrid model; continuing without drafts")


def test_models_are_told_apart_by_their_vocabularies(llama, tmp_path, monkeypatch, log):
    first = model_of(llama, None)
    assert (first.name, first.vocab_size) == ("tiny", VOCAB_SIZE)
    monkeypatch.setattr("llama_cpp.llama_vocab_get_text", lambda _, token: b"other%d" % token)
    assert first.configuration.startswith("llama:")
    assert model_of(llama, None).tokenizer != first.tokenizer
    monkeypatch.setattr("llama_cpp.llama_vocab_type", lambda _: 0)
    assert model_of(llama, None).tokenizer == ""
    (line,) = log.messages
    assert "/models/tiny.gguf has no vocabulary" in line
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"vocab_size": 40}')
    assert model_of(llama, tmp_path) == model_identity(tmp_path)


def test_a_model_that_computes_the_last_logits_alone_is_refused(llama):
    llama._logits_all = False
    with pytest.raises(ValueError, match="logits_all=True"):
        SsdDraftModel(llama, sidecar="embedded")
