"""One running sequence: its tokens, what of them is in the KV cache, and its draft."""

from __future__ import annotations

import numpy as np

from engine.sampling.logprobs import Logprobs, joined
from engine.sampling.penalties import TokenCounts
from engine.sampling.stopping import Cut, Stopping
from engine.scheduling.page_hashes import PageNames
from engine.scheduling.request import Completion, Request
from engine.speculation.draft_tree import DraftTree

NO_TOKENS = np.empty(0, np.uint32)
NO_SOURCES = np.empty(0, np.uint8)


class Sequence:
    """A request on its way to a completion."""

    def __init__(self, sequence_id: int, request: Request, max_length: int, stopping: Stopping | None = None) -> None:
        """`max_length` tokens, prompt and output together, are the most that it may reach.

        `stopping` knows the model's end tokens; without it the request's own settings end the output.
        """
        self.sequence_id = sequence_id
        self.request = request
        self.max_length = max_length
        self.pages: list[int] = []
        self.page_names = PageNames(request.salt)
        self.named_pages = 0
        """Leading pages that are full, committed, and known to the prefix cache."""
        self.computed = 0
        """Leading tokens whose keys and values are in the cache."""
        self.cached_tokens = 0
        """How many of the prompt's were there before it began."""
        self.scheduled = 0
        """Tokens after those that this step runs."""
        self.draft = NO_TOKENS
        """Draft tokens, uint32, that this step verifies behind them."""
        self.draft_sources = NO_SOURCES
        """Where each of them was found, uint8, as in `ssd.types.Source`; behind them perhaps of some left out."""
        self.tree: DraftTree | None = None
        """The draft's shape; None if each of its tokens follows the one before."""
        self.in_flight = 0
        """Tokens that a step under way may append at most, which is not known yet."""
        self.draft_room = 0
        """Draft tokens that its pages hold behind what is scheduled."""
        self.told = 0
        """Leading tokens that the drafter knows of; none before it was told of the sequence."""
        self.untold_steps = 0
        """Steps that it produced in since the drafter was told last."""
        self.last_verified = 0
        """Draft tokens that were verified in the first of them; in the others there is no draft."""
        self.last_accepted = 0
        self.preemptions = 0
        self.stopping = stopping or Stopping(request)
        self.token_counts = TokenCounts(request.prompt, max_length) if request.sampling.penalises else None
        """What penalties look at, if there are any."""
        self.logprobs: list[Logprobs] = []
        """Of the output's tokens, if asked for."""
        self.prompt_logprobs: list[Logprobs] = []
        """Of the prompt's tokens but the first, if asked for."""
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self._tokens = np.empty(max_length, np.uint32)
        self._tokens[: len(request.prompt)] = request.prompt
        self._length = len(request.prompt)

    def __len__(self) -> int:
        """Committed tokens, prompt and output."""
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """uint32 [len(self)]."""
        return self._tokens[: self._length]

    @property
    def output(self) -> np.ndarray:
        """uint32: what was produced so far."""
        return self._tokens[len(self.request.prompt) : self._length]

    @property
    def to_come(self) -> np.ndarray:
        """uint32: what it is to produce next whatever the logits say, if its output was recorded."""
        recorded = self.request.recorded
        return NO_TOKENS if recorded is None else recorded[len(self.output) :][: self.room]

    @property
    def untold(self) -> np.ndarray:
        """uint32: committed tokens that the drafter does not know of yet."""
        return self._tokens[self.told : self._length]

    @property
    def room(self) -> int:
        """Tokens that may still be produced."""
        return self.max_length - self._length

    @property
    def end(self) -> int:
        """Its tokens up to the last one that this step runs before the draft, at most."""
        return min(self.computed + self.scheduled + self.in_flight, self.max_length)

    @property
    def draft_depths(self) -> np.ndarray:
        """int64: how far behind the committed tokens each draft token stands, from 1."""
        return np.arange(1, len(self.draft) + 1) if self.tree is None else self.tree.depths

    @property
    def completes_prompt(self) -> bool:
        """Whether this step runs all committed tokens, so that the next one can be chosen."""
        return self.computed + self.scheduled == self._length

    def reuse(self, tokens: int) -> None:
        """Go on behind so many further tokens, whose keys and values were in the cache."""
        self.computed += tokens
        if self.preemptions == 0:
            self.cached_tokens += tokens

    def forget_computed(self) -> None:
        """Begin again, all tokens that are committed being the prompt."""
        self.computed = 0
        self.named_pages = 0
        self.in_flight = 0
        self.preemptions += 1

    @property
    def scored(self) -> range:
        """Positions that this step runs and whose logits are to be kept as those of the prompt's next token."""
        if self.request.sampling.prompt_logprobs is None:
            return range(0)
        last = len(self.request.prompt) - 1
        done = sum(len(part.tokens) for part in self.prompt_logprobs)
        assert min(self.computed, last) <= done, "prompt tokens whose log-probabilities are asked for were not run"
        return range(done, min(self.computed + self.scheduled, last))

    def commit(self, tokens: np.ndarray, accepted: int) -> None:
        """Append what a step produced: `accepted` draft tokens and the target's own, less what a stop cut off."""
        self.computed += self.scheduled + accepted
        self.steps += 1
        self.drafted += len(self.draft)
        self.accepted += accepted
        if self.untold_steps == 0:
            self.last_verified, self.last_accepted = len(self.draft), accepted
        self.untold_steps += 1
        self._tokens[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)
        if self.token_counts is not None:
            self.token_counts.add(tokens)

    def complete(self, cut: Cut) -> Completion:
        """The result, once the sequence has ended as `cut` says."""
        assert cut.reason is not None
        sampling = self.request.sampling
        return Completion(
            tokens=self.output.copy(),
            finish_reason=cut.reason,
            steps=self.steps,
            drafted=self.drafted,
            accepted=self.accepted,
            cached_tokens=self.cached_tokens,
            stop_reason=cut.stop_reason,
            text=self.stopping.text(),
            logprobs=None if sampling.logprobs is None else joined(self.logprobs, sampling.logprobs),
            prompt_logprobs=(
                None if sampling.prompt_logprobs is None else joined(self.prompt_logprobs, sampling.prompt_logprobs)
            ),
        )
