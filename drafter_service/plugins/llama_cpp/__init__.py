"""Drafts for llama-cpp-python, one model at a time.

    llama = Llama("model.gguf", logits_all=True)
    llama.draft_model = SsdDraftModel(llama)

`python -m drafter_service.plugins.llama_cpp.server` is the host's server with drafts.

The host gives a draft model nothing but the text, and says neither which request it belongs to nor when a request
ends. So a text that cannot follow from the last text and its draft begins a new request, and ends the one before.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from drafter_service.client.identity import gguf_identity, vocabulary_fingerprint
from drafter_service.observability.facts import ModelIdentity
from drafter_service.plugins.options import HostLimits
from drafter_service.plugins.session import DraftCounters, HostSession
from drafter_service.plugins.settings import HostLog, identity_of, name_and_version, read_settings, untested
from drafter_service.plugins.step_clock import StepClock

LOG = HostLog("llama_cpp")

TESTED = ("0.3.36",)
"""Versions of llama-cpp-python."""

MAX_DRAFT = 16
DEADLINE_S = 0.01
"""Default of the maximum wait for drafts, in seconds: a fraction of a step."""


class SsdDraftModel:
    """A value for the `draft_model` of a `Llama`. One model may use it, in one thread at a time."""

    def __init__(self, llama: Any, *, max_draft: int = MAX_DRAFT, **settings: Any) -> None:
        """Connect for drafts of at most `max_draft` tokens. The first time, kernels are compiled for about a minute.

        settings: see `PluginSettings`; by default those in the environment variable `SSD_PLUGIN`. Raises ValueError if
        max_draft is not positive or the `Llama` computes the last logits only, and UserError for settings that are not
        valid.
        """
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaDraftModel

        if not llama._logits_all:
            raise ValueError("drafts need the logits of all tokens: Llama(..., logits_all=True)")
        LlamaDraftModel.register(type(self))
        own = read_settings(settings, deadline_s=DEADLINE_S)
        own = replace(own, model=model_of(llama, own.folder), host=name_and_version("llama-cpp-python"))
        self._session = HostSession(
            own, HostLimits(max_draft, llama.n_vocab(), llama.n_ctx()), LOG.warning, inform=LOG.info
        )
        self._request_id = 0
        self._text = np.empty(0, np.intc)
        """Text of the running request; empty if there is none."""
        self._draft: list[int] = []
        """The draft that the host got after it."""
        self._clock = StepClock(self._session)
        reason = untested("llama-cpp-python", llama_cpp.__version__, TESTED)
        if getattr(llama, "_is_recurrent", False) or getattr(llama, "_is_hybrid", False):
            reason = "llama-cpp-python cannot remove rejected tokens from the state of a recurrent or hybrid model"
        self._is_supported = not reason
        if reason:
            LOG.warning(f"{reason}; continuing without drafts")
        else:
            self._session.open()

    @property
    def counters(self) -> DraftCounters:
        """Totals of all requests so far."""
        return self._session.counters

    def __call__(self, input_ids: np.ndarray, /, **_: Any) -> np.ndarray:
        """Return a draft, int32 [k], of at most `max_draft` tokens. input_ids: int32 [n], prompt and output so far."""
        text = np.array(input_ids, np.intc)  # The host reuses the array.
        draft: list[int] = []
        with self._session.guarded():
            if self._is_supported:
                draft = self._next(text)
        return np.array(draft, np.intc)

    def close(self) -> None:
        """End the last request, and close the connection or the embedded drafter."""
        self._finish()
        self._session.close()

    def __enter__(self) -> SsdDraftModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self, text: np.ndarray) -> list[int]:
        if follows(text, self._text, self._draft):
            self._clock.end()
        else:
            self._finish()
            self._request_id += 1
            self._session.start(self._request_id, text.data)
        self._text, self._draft = text, []
        self._draft = self._session.draft([(self._request_id, text.data)])[0]
        # The host verifies all of it: the session leaves room for it in the context window.
        self._session.schedule({self._request_id: self._draft})
        self._clock.begin(1 + len(self._draft))
        return self._draft

    def _finish(self) -> None:
        if len(self._text):
            self._session.finish(self._request_id, self._text.data)
            self._text, self._draft = self._text[:0], []


def follows(text: np.ndarray, before: np.ndarray, draft: list[int]) -> bool:
    """Return whether a text is an earlier one after the step that verified a draft: accepted tokens and one more."""
    added = text[len(before) :]
    accepted = len(added) - 1
    return (
        0 <= accepted <= len(draft)
        and len(before) > 0
        and np.array_equal(text[: len(before)], before)
        and np.array_equal(added[:accepted], draft[:accepted])
    )


def model_of(llama: Any, folder: Path | None) -> ModelIdentity:
    """Return the identity of a model, named after its GGUF file: that of a folder, or of the file's own vocabulary."""
    name = Path(llama.model_path).stem
    if folder is not None:
        return identity_of(name, llama.n_vocab(), LOG.warning, folder=folder)
    return gguf_identity(name, _fingerprint(llama), llama.n_vocab(), llama.metadata)


def _fingerprint(llama: Any) -> str:
    """Return the fingerprint of a model's vocabulary; "" if its GGUF file has none."""
    import llama_cpp

    vocabulary = llama_cpp.llama_model_get_vocab(llama.model)
    if llama_cpp.llama_vocab_type(vocabulary) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
        LOG.warning(
            f'{llama.model_path} has no vocabulary; the corpus is named after the file alone; set "folder" to a folder '
            "with the model's tokenizer.json and config.json"
        )
        return ""
    return vocabulary_fingerprint(llama_cpp.llama_vocab_get_text(vocabulary, token) for token in range(llama.n_vocab()))
