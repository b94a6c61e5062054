"""The texts of a worker's requests, and their drafts. It imports none of the host's modules."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from drafter_service.plugins.options import End
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.vllm.scheduler import REPORT

RECENT_STEPS = 8
"""Number of steps whose longest draft the next ones have room for: drafts of a few requests come and go."""


@dataclass(slots=True)
class RunningText:
    """The text of a request in the worker. The scheduler's report of its end comes later."""

    tokens: list[int]
    prompt_length: int
    max_length: int
    """Length at which the host ends the request."""
    stops: frozenset[int]
    """Tokens that end it."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the tokens of a step up to the one where the host ends the request."""
        for token in tokens:
            if self.is_complete:
                return
            self.tokens.append(token)

    @property
    def is_complete(self) -> bool:
        """Whether the host ends the request here."""
        length = len(self.tokens)
        return length >= self.max_length or (length > self.prompt_length and self.tokens[-1] in self.stops)


class WorkerDrafts:
    """The drafts of a worker's requests."""

    def __init__(
        self,
        session: HostSession,
        max_draft: int,
        context_window: int,
        *,
        lengths: Sequence[int] = (),
        measures: bool = False,
    ) -> None:
        """max_draft: width of the host's drafts, in tokens. context_window: maximum length of a text.

        lengths: ascending lengths of drafts among which the host lets this class choose; empty: it does not. measures:
        whether a step begins when the drafts for it are known, so that its duration can be measured.
        """
        self.session = session
        self._max_draft = max_draft
        self._context_window = context_window
        self._lengths = lengths
        self._longest: deque[int] = deque(maxlen=RECENT_STEPS)
        """Length of the longest draft after each of the last steps."""
        self._texts: dict[str, RunningText] = {}
        self._given: dict[str, list[int]] = {}
        """The draft of each request for the next step."""
        self._measures = measures
        self._ended_s = 0.0
        """Time at which the last drafts were known."""

    @property
    def step_length(self) -> int | None:
        """Number of draft tokens to verify in a later step; None if the host decides."""
        if not self._lengths or not self._longest:
            return None
        longest = max(self._longest)
        return next((length for length in self._lengths if length >= longest), self._lengths[-1])

    def update(self, scheduler_output: Any) -> None:
        """Begin and end requests with a `SchedulerOutput` that has a `StepReport`."""
        report = getattr(scheduler_output, REPORT, None)
        if report is None:
            return
        with self.session.guarded():
            for request_id, (end, length) in report.ended.items():
                text = self._texts.pop(request_id, None)
                self._given.pop(request_id, None)
                if text is not None:
                    if end is End.FINISHED and length < len(text.tokens):
                        # By `repetition_detection`. The drafter may know tokens that the client did not get.
                        end = End.CANCELLED
                    self.session.finish(request_id, text.tokens[:length], end)
            for new in scheduler_output.scheduled_new_reqs:
                if (options := report.started.get(new.req_id)) is None:
                    continue
                self._given.pop(new.req_id, None)
                sampling, prompt = new.sampling_params, new.prompt_token_ids
                self._texts[new.req_id] = RunningText(
                    list(new.prefill_token_ids),
                    len(prompt),
                    min(self._context_window, len(prompt) + (options.max_tokens or self._context_window)),
                    frozenset({*(sampling.stop_token_ids or ()), sampling.eos_token_id} - {None}),
                )
                if new.req_id not in self.session:  # Not one that continues after it was preempted.
                    self.session.start(new.req_id, prompt, options, sampling.extra_args)

    def after_step(
        self,
        request_ids: Sequence[str],
        tokens: np.ndarray,
        counts: np.ndarray,
        verified: np.ndarray,
        networks: np.ndarray,
        step_tokens: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return drafts for the next step, int64 [requests, K], and how likely each token is accepted, given that those
        before it are, float32 [requests, K]: -1 for tokens of the host's network without an estimate, 0 for
        padding.

        A shorter draft is padded with the tokens of the network, then with the last token of the text. tokens: int64
        [requests, up to K + 1], of which `counts` are valid. verified: number of draft tokens that the step verified.
        counts, verified: [requests]. networks: int64 [requests, n], the drafts of the host's network, n = 0 without
        one. step_tokens: number of all tokens of the step.
        """
        length = networks.shape[1]
        drafts = np.zeros((len(request_ids), self._max_draft), np.int64)
        accept_prob = np.zeros(drafts.shape, np.float32)
        drafts[:, :length], accept_prob[:, :length] = networks, -1.0
        with self.session.guarded():
            # An engine that has been idle runs no request of the step before.
            if self._measures and not self._given.keys().isdisjoint(request_ids):
                self.session.record_step(step_tokens, len(request_ids), perf_counter() - self._ended_s)
            ready, scheduled = [], {}
            rows = zip(request_ids, tokens.tolist(), counts.tolist(), verified.tolist(), strict=True)
            for row, (request_id, produced, count, verified_count) in enumerate(rows):
                text = self._texts.get(request_id)
                if text is None or not count:
                    continue
                drafts[row, length:] = produced[count - 1]
                if (given := self._given.pop(request_id, None)) and verified_count:
                    scheduled[request_id] = given[:verified_count]
                text.extend(produced[:count])
                if not text.is_complete:
                    ready.append((row, request_id, text.tokens))
            self.session.schedule(scheduled)
            own = [networks[row].tolist() for row, _, _ in ready] if length else ()
            found = self.session.draft_trees([(request_id, text) for _, request_id, text in ready], networks=own)
            for (row, request_id, _), draft in zip(ready, found, strict=True):
                self._given[request_id] = draft.tokens
                drafts[row, : len(draft)] = draft.tokens
                if draft.accept_prob or not draft.tokens:
                    accept_prob[row] = 0.0
                    accept_prob[row, : len(draft)] = draft.accept_prob
            if ready:
                self._longest.append(max(map(len, found)))
            self._ended_s = perf_counter()
        return drafts, accept_prob

    def close(self) -> None:
        """Close the session."""
        self.session.close()
