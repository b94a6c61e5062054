"""State of a request that outlives a step: its tokens, its pages, and counters."""

from __future__ import annotations

import numpy as np

from engine.drafters.sources import NO_SOURCES, SOURCE_NAMES, DraftCounts, count_sources, counts_by_name
from engine.sampling.grammar_state import GrammarState
from engine.sampling.logprobs import Logprobs, join_logprobs
from engine.sampling.stopping import Cut, Stopping
from engine.sampling.token_counts import TokenCounts
from engine.scheduling.page_hashes import PageHashes
from engine.scheduling.request import Completion, Request, SamplingParams
from engine.scheduling.table import (
    ACCEPTED,
    ADMISSION,
    BY_END_TOKENS,
    BY_LENGTH,
    BY_REQUEST,
    COLUMNS,
    COMPUTED,
    DRAFTED,
    END,
    HAS_GRAMMAR,
    IN_FLIGHT,
    KIND,
    LENGTH,
    LIMIT,
    MAX_DRAFT,
    NEEDS_HOST,
    NO_PAGES,
    NO_ROW,
    PAGES,
    PROMPT,
    REGISTERED,
    SAMPLED,
    SCORED,
    SEQUENCE_ID,
    STEPS,
    TEXT,
    TRUNCATES,
)

UNLIMITED = 1 << 31
"""Value of MAX_DRAFT for requests without a limit of their own."""


class Sequence:
    """State of one request from its arrival to its completion."""

    def __init__(
        self,
        sequence_id: int,
        request: Request,
        max_length: int,
        stopping: Stopping | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        """max_length: largest number of tokens, prompt and output together.

        `stopping`: by default only the request's own settings end the output, not the model's end tokens.
        grammar: its state before the first token, if the request has one.
        """
        self.sequence_id = sequence_id
        self.request = request
        self.max_length = max_length
        self.is_running = False
        """Whether it is among the scheduler's running sequences."""
        self.row = NO_ROW
        """Its row in the table of running requests; NO_ROW before its first admission and after its end."""
        self.page_table = NO_PAGES
        """int32: its row of page tables, of which `held_pages` is in use."""
        self.page_hashes = PageHashes(request.salt, request.adapter)
        self.cached_tokens = 0
        """Number of prompt tokens whose keys and values were in the prefix cache when the sequence started."""
        self.preemptions = 0
        self.stopping = stopping or Stopping(request)
        self.token_counts = TokenCounts(request.prompt, max_length) if request.sampling.penalizes else None
        """Counts for penalties; None if the request has none."""
        self.grammar = grammar
        """State of the grammar after the committed tokens; None if the request has none."""
        self.logprobs: list[Logprobs] = []
        """Log-probabilities of output tokens, if requested."""
        self.prompt_logprobs: list[Logprobs] = []
        """Log-probabilities of prompt tokens except the first, if requested."""
        self.predicted_drafted = self.predicted_accepted = 0
        """Numbers of verified and accepted draft tokens that continue the request's hints."""
        self._tokens = np.empty(max_length, np.uint32)
        self._tokens[: len(request.prompt)] = request.prompt
        self.state = np.zeros(COLUMNS, np.int64)
        """int64 [COLUMNS], see `engine.scheduling.table`: its row there, or its own."""
        self.state[[SEQUENCE_ID, TEXT, LENGTH, PROMPT, LIMIT, MAX_DRAFT, END, KIND]] = (
            self.sequence_id, self._tokens.ctypes.data, len(request.prompt), len(request.prompt), max_length,
            _largest_draft(request), self._how_it_ends(), _kind_of(request.sampling),
        )  # fmt: skip

    def _how_it_ends(self) -> int:
        sampling = self.request.sampling
        if sampling.max_tokens == 0:
            return SCORED
        if sampling.needs_host or not self.stopping.is_by_end_tokens or self.request.hints is not None:
            return BY_REQUEST
        return BY_LENGTH if sampling.ignore_eos else BY_END_TOKENS

    def __len__(self) -> int:
        """Number of committed tokens, prompt and output."""
        return int(self.state[LENGTH])

    @property
    def tokens(self) -> np.ndarray:
        """uint32 [len(self)]: committed tokens."""
        return self._tokens[: self.state[LENGTH]]

    @property
    def output(self) -> np.ndarray:
        """uint32: committed tokens after the prompt."""
        return self._tokens[self.state[PROMPT] : self.state[LENGTH]]

    @property
    def pages(self) -> list[int]:
        """Page table."""
        return self.held_pages.tolist()

    @property
    def held_pages(self) -> np.ndarray:
        """int32: page table."""
        return self.page_table[: self.state[PAGES]]

    @property
    def computed(self) -> int:
        """Number of leading tokens whose keys and values are in the cache, or are computed by a step in flight."""
        return int(self.state[COMPUTED])

    @computed.setter
    def computed(self, tokens: int) -> None:
        self.state[COMPUTED] = tokens

    @property
    def in_flight(self) -> int:
        """Largest number of tokens that steps in flight may append."""
        return int(self.state[IN_FLIGHT])

    @property
    def recorded_rest(self) -> np.ndarray:
        """uint32 [n]: recorded tokens that follow the committed ones."""
        recorded = self.request.recorded
        return np.empty(0, np.uint32) if recorded is None else recorded[len(self.output) :][: self.room]

    @property
    def is_scored(self) -> bool:
        """Whether the prompt has run completely, of a request that has no output."""
        return self.request.sampling.max_tokens == 0 and self.computed == len(self)

    @property
    def room(self) -> int:
        """Number of tokens that may still be produced."""
        return self.max_length - len(self)

    def end_after(self, scheduled: int) -> int:
        """Return the largest number of tokens in the cache after `scheduled` more have run, without drafts."""
        return min(self.computed + scheduled + self.in_flight, self.max_length)

    def add_pages(self, pages: np.ndarray) -> None:
        """Append pages, int32 [n], to the page table."""
        held = int(self.state[PAGES])
        self.page_table[held : held + len(pages)] = pages
        self.state[PAGES] = held + len(pages)

    def reuse(self, tokens: int) -> None:
        """Advance by `tokens` tokens whose keys and values were found in the prefix cache."""
        self.computed += tokens
        if self.preemptions == 0:
            self.cached_tokens += tokens

    def restart(self) -> None:
        """Start again after a preemption, with all committed tokens as the prompt."""
        self.state[[COMPUTED, IN_FLIGHT, PAGES, REGISTERED, ADMISSION]] = 0
        self.preemptions += 1

    def commit(
        self,
        tokens: np.ndarray,
        *,
        drafted: np.ndarray = NO_SOURCES,
        accepted: np.ndarray = NO_SOURCES,
        logprobs: Logprobs | None = None,
    ) -> None:
        """Append the tokens of a step, uint32 [n], which computed the keys and values of all but the last one.

        drafted, accepted: uint8 [k] and [a], sources of the draft tokens that the step verified and accepted. logprobs:
        those of `tokens`.
        """
        state, length = self.state, len(self)
        state[COMPUTED] += 1 + len(accepted)
        state[STEPS] += 1
        for column, sources in ((DRAFTED, drafted), (ACCEPTED, accepted)):
            if len(sources):
                state[column : column + len(SOURCE_NAMES)] += count_sources(sources)
        self._tokens[length : length + len(tokens)] = tokens
        state[LENGTH] = length + len(tokens)
        if self.token_counts is not None:
            self.token_counts.add(tokens)
        if self.grammar is not None:
            for token in tokens.tolist():
                self.grammar.advance(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def complete(self, cut: Cut) -> Completion:
        """Return the completion of a sequence that ended with `cut`."""
        assert cut.reason is not None
        sampling = self.request.sampling
        drafted, accepted = self.state[DRAFTED:].reshape(2, -1)
        return Completion(
            tokens=self.output.copy(),
            finish_reason=cut.reason,
            steps=int(self.state[STEPS]),
            drafted=int(drafted.sum()),
            accepted=int(accepted.sum()),
            by_source=counts_by_name(drafted, accepted),
            predicted=DraftCounts(self.predicted_drafted, self.predicted_accepted),
            cached_tokens=self.cached_tokens,
            stop_reason=cut.stop_reason,
            text=self.stopping.text(),
            logprobs=None if sampling.logprobs is None else join_logprobs(self.logprobs, sampling.logprobs),
            prompt_logprobs=(
                None
                if sampling.prompt_logprobs is None
                else join_logprobs(self.prompt_logprobs, sampling.prompt_logprobs)
            ),
        )


def _largest_draft(request: Request) -> int:
    """Return the value of MAX_DRAFT."""
    if not request.is_drafted:
        return 0
    return UNLIMITED if request.max_draft is None else request.max_draft


def _kind_of(sampling: SamplingParams) -> int:
    """Return the value of KIND."""
    needs_host = sampling.needs_host or (sampling.verification == "rejection" and sampling.is_sampled)
    bits = (SAMPLED, sampling.is_sampled), (TRUNCATES, sampling.truncates), (NEEDS_HOST, needs_host)
    return sum(bit * has for bit, has in (*bits, (HAS_GRAMMAR, sampling.grammar is not None)))
