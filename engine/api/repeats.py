"""Answer repeated requests from the drafter's corpus, without running the model.

The text of an answer is in the corpus alone. A bounded table has the size and the digest of each output; the text is
found by the name under which it was appended, and compared with both and with the prompt. Text that was forgotten,
overwritten, or divided because of its length is not found, and the request runs.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import astuple, replace
from typing import TYPE_CHECKING

import numpy as np

from engine.scheduling.request import Completion, FinishReason, Request

if TYPE_CHECKING:
    from engine.engine import Engine

MOST = 1 << 14
"""Largest number of outputs that can be repeated, about 350 bytes each; the least recently used are dropped first."""


def request_id_of(request: Request) -> str:
    """Return a digest of everything that an output depends on, of the settings of its drafts, and of its salt."""
    sampling = request.sampling if request.sampling.is_sampled else replace(request.sampling, seed=0)
    settings = (astuple(sampling), request.adapter, request.salt, request.drafters, request.max_draft)
    # A tuple's `repr` shows where it ends, so no settings with another prompt give the same bytes.
    given = repr(settings).encode(errors="surrogatepass") + request.prompt.tobytes()
    return hashlib.blake2b(given, digest_size=32).hexdigest()


class Repeats:
    """Outputs of one engine that can be repeated."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._outputs: OrderedDict[str, tuple[int, bytes]] = OrderedDict()
        """Number of tokens and digest of each output, by request id."""

    def add(self, request: Request, completion: Completion) -> None:
        """Record the output of a request that has ended, if it has an id and the drafter remembers it."""
        if request.request_id is None or not request.learn or completion.finish_reason is FinishReason.ABORT:
            return
        self._outputs[request.request_id] = len(completion.tokens), _digest(completion.tokens)
        self._outputs.move_to_end(request.request_id)
        if len(self._outputs) > MOST:
            self._outputs.popitem(last=False)

    def find(self, request: Request) -> Completion | None:
        """Return the completion of an earlier request with the same id; None if the request must run."""
        known = None if request.request_id is None else self._outputs.get(request.request_id)
        # New weights are under way: the request belongs to them.
        if request.request_id is None or known is None or self._engine.scheduler.is_draining:
            return None
        self._outputs.move_to_end(request.request_id)
        size, digest = known
        for corpus in self._engine.drafter.corpora(request.adapter):
            text = corpus.text_of(request.request_id)
            before, output = text[: max(0, len(text) - size)], text[max(0, len(text) - size) :]
            has_prompt = np.array_equal(before, request.prompt[len(request.prompt) - len(before) :])
            if has_prompt and len(output) == size and _digest(output) == digest:
                return self._engine.completed(request, output)
        return None

    def clear(self) -> None:
        """Drop all outputs, since the weights have changed."""
        self._outputs.clear()


def _digest(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=32).digest()
