"""Check requests against an engine's model, settings and memory, and make their sequences."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.config import ContextWindow, EngineConfig
from engine.models.config import ModelConfig
from engine.models.tokenizer import Decode
from engine.sampling.stopping import Stopping
from engine.scheduling.pages import PagePool
from engine.scheduling.request import Request
from engine.scheduling.sequence import Sequence
from ssd.errors import UserError

if TYPE_CHECKING:
    from engine.sampling.grammar_state import GrammarCompiler, GrammarState


class Intake:
    """Checks the requests of one engine, and makes their sequences."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        pages: PagePool,
        *,
        decode: Decode | None = None,
        drafters: Collection[str] = (),
        grammars: GrammarCompiler | None = None,
        adapters: Collection[str] = (),
    ) -> None:
        """decode, drafters, grammars: see `engine.engine.Engine`. adapters: names that requests may choose."""
        self._model = model
        self._config = config
        size = min(model.max_positions, pages.count * pages.page_size)
        self.window = ContextWindow(size, model.max_positions, config.kv_memory_mib)
        """Largest number of tokens of a prompt and its output together."""
        self._decode = decode
        self._drafters = drafters
        self._grammars = grammars
        self._adapters = adapters

    def sequence(self, sequence_id: int, request: Request) -> Sequence:
        """Return a new sequence. Raises UserError for a request that cannot run."""
        longest, grammar = self.check(request)
        if request.sampling.verification is None and self._config.verification != "exact":
            request = replace(request, sampling=replace(request.sampling, verification=self._config.verification))
        stopping = Stopping(request, self._model.eos_token_ids, self._decode)
        return Sequence(sequence_id, request, longest, stopping, grammar)

    def check(self, request: Request) -> tuple[int, GrammarState | None]:
        """Return the largest number of tokens, prompt and output, that a request may reach.

        The second value is the grammar's state before the first token, if the request has one. Raises UserError for a
        request that cannot run.
        """
        request.check(self._model)
        self.window.check(len(request.prompt), request.sampling.max_tokens)
        request.check_drafting(self._drafters, self._config.max_draft)
        request.check_adapter(self._adapters)
        if request.sampling.stop and self._decode is None:
            raise UserError("stop needs the model's tokenizer, which this engine was not given; use stop_token_ids")
        grammar, state = request.sampling.grammar, None
        if grammar is not None:
            if self._grammars is None:
                raise UserError(f"{grammar.kind} needs the model's tokenizer, which this engine was not given")
            state = self._grammars.start(grammar)
        return min(len(request.prompt) + request.sampling.max_tokens, self.window.tokens), state
