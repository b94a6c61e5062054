"""The plug-in for llama-cpp-python, with the host's own `Llama.generate` where its Python files are importable.

Everywhere else a twin of it runs, with modules that are made of recorded signatures.

The host's C library is not needed: a small target in Python takes its place.
"""

import ctypes
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from drafter_service.client.identity import model_identity
from drafter_service.plugins.llama_cpp import SsdDraftModel
from drafter_service.plugins.llama_cpp.draft_model import LOG, TESTED, model_of
from tests.drafter_service.plugins import signatures
from tests.drafter_service.plugins.equal_steps import use_equal_steps

VOCAB_SIZE = 50
CONTEXT = 80
PROMPTS = [[1, 2, 3], [4, 5, 6, 1, 2, 3, 4, 5, 6], [2, 2]]


def target(text):
    """Return the target's next token: a loop with a turn here and there."""
    return int(text[-1] * 3 + text[-2] + (len(text) % 11 == 0)) % 7


class TwinGenerate:
    """The host's loop over steps, with the calls of its draft model in the same places."""

    def generate(self, tokens, **_):
        tokens = list(tokens)
        self.n_tokens, sample_at = 0, len(tokens) - 1
        while True:
            self.eval(tokens)
            while sample_at < self.n_tokens:
                token = self.sample(idx=sample_at)
                sample_at += 1
                yield token
                tokens = [token]
                if sample_at < self.n_tokens and token != self.input_ids[sample_at]:
                    self.n_tokens = sample_at
                    break
            if self.draft_model is not None:
                self.input_ids[self.n_tokens] = tokens[0]
                draft = self.draft_model(self.input_ids[: self.n_tokens + 1])
                tokens.extend(draft.astype(int)[: CONTEXT - self.n_tokens - 1])


def real_llama(monkeypatch):
    """Import the host with a replacement of its C library; skip the test where the host is missing."""
    if find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed; make hosts installs it")

    for name in [name for name in sys.modules if name.split(".")[0] == "llama_cpp"]:
        monkeypatch.delitem(sys.modules, name)
    with monkeypatch.context() as during_import:
        during_import.setattr(Path, "exists", lambda _: True)
        during_import.setattr(ctypes, "CDLL", lambda *_, **__: MagicMock())
        try:
            return importlib.import_module("llama_cpp").Llama
        except ImportError as problem:
            pytest.skip(f"llama-cpp-python cannot be imported here: {problem}")


@pytest.fixture(params=["recorded", "installed"])
def llama(request, monkeypatch):
    """Return a `Llama` that runs the target."""
    if request.param == "installed":
        base = real_llama(monkeypatch)
    else:
        base = TwinGenerate
        signatures.stand_in(signatures.load("llama_cpp"), monkeypatch)
        monkeypatch.setattr("llama_cpp.__version__", TESTED[0], raising=False)
        monkeypatch.setattr("llama_cpp.llama_speculative.LlamaDraftModel.register", lambda _: None, raising=False)

    vocabulary = {
        "LLAMA_VOCAB_TYPE_NONE": 0,
        "llama_model_get_vocab": lambda model: model,
        "llama_vocab_type": lambda _: 2,
        "llama_vocab_get_text": lambda _, token: b"%d" % token,
    }
    for name, value in vocabulary.items():
        monkeypatch.setattr(f"llama_cpp.{name}", value, raising=False)

    class Model(base):
        model = None

        def __init__(self):
            self.model_path, self._logits_all, self.verbose = "/models/tiny.gguf", True, False
            self.n_tokens, self._n_ctx, self._requires_eval = 0, CONTEXT, True
            self.input_ids = np.zeros(CONTEXT, np.intc)
            self.draft_model, self.steps = None, 0
            self._is_recurrent = self._is_hybrid = False
            self._ctx = SimpleNamespace(kv_cache_seq_rm=lambda *_: True)

        def n_vocab(self):
            return VOCAB_SIZE

        def n_ctx(self):
            return CONTEXT

        def close(self):
            pass

        def _init_sampler(self, **_):
            pass

        def eval(self, tokens):
            assert self.n_tokens + len(tokens) <= CONTEXT
            assert all(0 <= token < VOCAB_SIZE for token in tokens)
            self.steps += 1
            self.input_ids[self.n_tokens : self.n_tokens + len(tokens)] = tokens
            self.n_tokens += len(tokens)

        def sample(self, *, idx, **_):
            return target(self.input_ids[: idx + 1])

    return Model()


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


def plain(prompt, tokens=30):
    text = list(prompt)
    for _ in range(tokens):
        text.append(target(text))
    return text[len(prompt) :]


def corpus_of(ssd):
    corpus = ssd._session._namespaces.find("", "").drafter.corpus
    corpus.refresh()
    return corpus


def test_the_installed_host_is_a_tested_version_with_the_recorded_signatures(monkeypatch):
    real_llama(monkeypatch)
    recorded = signatures.load("llama_cpp")
    assert signatures.record(recorded) == recorded
    assert sys.modules["llama_cpp"].__version__ in TESTED


def test_the_plug_in_has_the_signature_of_the_host():
    recorded = signatures.load("llama_cpp")["llama_cpp.llama_speculative"]["LlamaDraftModel"]["__call__"]
    assert signatures.signature_text(SsdDraftModel.__call__).replace("_)", "kwargs)") == recorded


def test_outputs_are_those_without_drafts(llama, ssd):
    steps = []
    for _ in range(2):
        before = llama.steps
        assert [generated(llama, prompt) for prompt in PROMPTS] == [plain(prompt) for prompt in PROMPTS]
        steps.append(llama.steps - before)
        corpus_of(ssd)
    assert steps[1] < steps[0] < 30 * len(PROMPTS)


def test_a_request_is_one_sequence_and_the_next_one_ends_it(llama, ssd, monkeypatch):
    started, finished = [], []
    start, finish = ssd._session.start, ssd._session.finish
    monkeypatch.setattr(ssd._session, "start", lambda *told: (started.append(list(told[1])), start(*told)))
    monkeypatch.setattr(ssd._session, "finish", lambda *told: (finished.append(list(told[1])), finish(*told)))
    texts = [prompt + generated(llama, prompt) for prompt in [*PROMPTS, PROMPTS[-1]]]
    ssd.close()
    assert [text[: len(begun)] for begun, text in zip(started, texts, strict=True)] == started
    assert [text[: len(ended)] for ended, text in zip(finished, texts, strict=True)] == finished
    # The host does not tell the tokens after the last draft.
    assert all(len(text) - len(ended) <= 9 for ended, text in zip(finished, texts, strict=True))


def test_the_next_turn_of_a_conversation_is_a_new_request(llama, ssd):
    turn = PROMPTS[0] + generated(llama, PROMPTS[0])
    number = ssd._request_id
    assert generated(llama, [*turn, 20, 21]) == plain([*turn, 20, 21])
    assert ssd._request_id == number + 1


def test_drafts_end_with_the_context_window(llama, ssd):
    tokens = CONTEXT - len(PROMPTS[0]) - 1
    for _ in range(2):
        assert generated(llama, PROMPTS[0], tokens) == plain(PROMPTS[0], tokens)
        corpus_of(ssd)


def test_drafts_are_arrays_of_the_hosts_type(llama, ssd):
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


def test_a_missing_sidecar_costs_drafts(llama, log):
    with SsdDraftModel(llama, sidecar="unix:/nonexistent/drafter.sock") as ssd:
        llama.draft_model = ssd
        assert generated(llama, PROMPTS[0]) == plain(PROMPTS[0])
        assert ssd.counters.drafted == ssd.counters.failures == 0


def test_models_are_told_apart_by_their_vocabularies(llama, tmp_path, monkeypatch, log):
    first = model_of(llama, None)
    assert (first.name, first.vocab_size) == ("tiny", VOCAB_SIZE)
    monkeypatch.setattr("llama_cpp.llama_vocab_get_text", lambda _, token: b"other%d" % token)
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
