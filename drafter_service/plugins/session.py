"""The layer between a host and its drafters: requests and texts in, drafts as lists of ints out.

A plug-in starts each request once, gives its whole text in every step, says which draft tokens the host verifies, and
ends it. Whatever the host does in between (preempt, retract, batch anew, repeat or reorder requests, pad drafts, drop
requests without reporting their end), the drafter gets a sequence whose text only grows.

Nothing raises into the host. Failures cost drafts, and are reported at most once a minute.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from drafter_service.plugins.draft import (
    NO_DRAFT,
    Draft,
    TrackedRequest,
    Turn,
    drafts_of,
    path_of,
    progress_of,
    valid_prefix,
)
from drafter_service.plugins.hints import HintTokenizer
from drafter_service.plugins.namespaces import HostNamespaces
from drafter_service.plugins.options import End, HostLimits, RequestOptions, group_of
from drafter_service.plugins.settings import PluginSettings
from ssd.errors import Failures, UserError

if TYPE_CHECKING:
    from drafter_service.plugins.combination import Combination
    from drafter_service.plugins.namespaces import HostDrafter


@dataclass
class DraftCounters:
    """Totals since the session began."""

    steps: int = 0
    """Steps of requests: each produced one token besides the accepted ones."""
    drafted: int = 0
    """Draft tokens that the host was given, which may verify fewer."""
    verified: int = 0
    """Draft tokens that the host verified."""
    accepted: int = 0
    failures: int = 0
    """Failures that cost drafts."""

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a step produced, steps without draft included; 0 before the first step."""
        return 1 + self.accepted / self.steps if self.steps else 0.0


class Guard:
    """A context that holds a lock, and suppresses exceptions. It takes a third of the time of a generator."""

    def __init__(self, fail: Callable[[Exception], None]) -> None:
        """fail: called with each exception."""
        self._fail, self._lock = fail, threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, _kind: type[BaseException] | None, problem: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        try:
            if isinstance(problem, Exception):
                self._fail(problem)
                return True
            return False
        finally:
            self._lock.release()


class HostSession:
    """The requests of one host. Any thread may call it."""

    def __init__(
        self,
        settings: PluginSettings,
        limits: HostLimits,
        report: Callable[[str], None],
        open_drafter: Callable[[str, str], HostDrafter] | None = None,
        inform: Callable[[str], None] = lambda _: None,
    ) -> None:
        """report: writes a message to the host's log, from any thread; called once for each kind of problem, and at
        most once a minute for failures. open_drafter, inform: see `HostNamespaces`.
        """
        self.counters = DraftCounters()
        self._failures = Failures()
        self._limits = limits
        # An identity read from the model's files may have a smaller vocabulary than the host.
        self._vocab_size = min(limits.vocab_size, settings.model.vocab_size or limits.vocab_size)
        self._rollouts = settings.rollouts
        self._report = report
        self._reported: set[str] = set()
        self.namespaces = HostNamespaces(settings, limits, report, self._report_once, open_drafter, inform)
        self._hints = HintTokenizer(settings.folder, self._report_once)
        self._requests: OrderedDict[Hashable, TrackedRequest] = OrderedDict()
        """By the host's id, least recently drafted first."""
        self._sequences = 0
        """Number of sequences so far: their ids are never used twice, unlike those of hosts."""
        self._guard = Guard(self._fail)
        self._combination: Combination | None = None
        if limits.has_network:
            with self.guarded():
                from drafter_service.plugins.combination import Combination

                self._combination = Combination(limits, self._vocab_size, withholds=settings.shadow)

    def __contains__(self, request_id: Hashable) -> bool:
        """Whether a request was started and has not ended."""
        return request_id in self._requests

    @property
    def running(self) -> int:
        """Number of requests that were started and have not ended."""
        return len(self._requests)

    def open(self) -> None:
        """Connect, so that what prevents drafts is reported, and kernels are compiled, before the first request."""
        with self.guarded():
            self.namespaces.find("", "")

    def start(
        self,
        request_id: Hashable,
        prompt: Sequence[int],
        options: RequestOptions | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a request. A running one with the same id ends first, and is not learned.

        extras: options that the host's client gave with the request, see `RequestOptions.with_extras`. If they cannot
        be read, the request has no drafts and is not learned.
        """
        with self.guarded():
            self._drop(request_id)
            ids = np.array(prompt, np.int64)
            request = TrackedRequest.of(ids, options or RequestOptions(), self._limits.context_window)
            self._requests[request_id] = request
            if len(self._requests) > self._limits.max_requests:
                self._drop(next(iter(self._requests)))
            try:
                group = group_of(ids) if self._rollouts else None
                warn = partial(self._report_once, "hints")
                request.options = request.options.with_extras(extras or {}, group, warn)
            except ValueError as problem:
                self._report_once("extras", f"options of a request: {problem}; it has no drafts")
                return
            if request.options.hint_texts:
                request.hints = self._hints.start(request.options.hint_texts)
            if request.hints is None:
                self._begin(request, ids)

    def schedule(self, drafts: Mapping[Any, Sequence[int]]) -> None:
        """Record the draft tokens that the host verifies in the step that it begins, by request id.

        They may be fewer than the last draft has, none, or padding. Only the first call after a draft counts.
        """
        with self.guarded():
            for request_id, tokens in drafts.items():
                if (request := self._requests.get(request_id)) is not None:
                    request.schedule(tokens)

    def record_step(self, tokens: int, sequences: int, seconds: float) -> None:
        """Record a step that the host has run, from which the drafter learns how much to draft.

        tokens: those of prompts, and of each decoding sequence one and its verified draft tokens. sequences: number of
        those with any. seconds: its duration without calls of this session.
        """
        with self.guarded():
            self.namespaces.record_step(tokens, sequences, seconds)
            if self._combination is not None:
                self._combination.record_step(tokens, sequences, seconds)

    def draft(
        self,
        texts: Sequence[tuple[Hashable, Sequence[int]]],
        prompt_tokens: int = 0,
        other_sequences: int = 0,
        networks: Sequence[Sequence[int]] = (),
    ) -> list[list[int]]:
        """Return the tokens of a draft for each request of a batch, as `draft_trees` does for paths."""
        return [draft.tokens.copy() for draft in self.draft_trees(texts, prompt_tokens, other_sequences, networks)]

    def draft_trees(
        self,
        texts: Sequence[tuple[Hashable, Sequence[int]]],
        prompt_tokens: int = 0,
        other_sequences: int = 0,
        networks: Sequence[Sequence[int]] = (),
    ) -> list[Draft]:
        """Return a draft for each request of a batch, a path unless the host's limits allow trees.

        texts: pairs of a request's id and its text, prompt and output. From the first id outside of the vocabulary on,
        such as a placeholder of a step in flight, a text is ignored, and there is no draft. Requests that were not
        started have none either, nor does the second of two with the same id. prompt_tokens, other_sequences: numbers
        of prompt tokens, and of decoding requests beside those of `texts`, that the host is expected to run in the same
        step. networks: the drafts of the host's own network, one for each text, if `HostLimits.has_network`. A request
        without draft of the drafter has that of the network.
        """
        drafts = [NO_DRAFT] * len(texts)
        with self.guarded():
            if len(networks) == len(texts):
                longest = self._limits.max_draft
                networks = [valid_prefix(tokens, self._vocab_size)[:longest] for tokens in networks]
                drafts = [*map(path_of, networks)]
            else:
                networks = [()] * len(texts)
            paused = self.namespaces.take_paused()
            by_namespace: dict[int, list[Turn]] = {}
            seen = set()
            for index, (request_id, text) in enumerate(texts):
                request = self._requests.get(request_id)
                if request is None or request_id in seen:
                    continue
                seen.add(request_id)
                self._requests.move_to_end(request_id)
                if request.hints is not None and request.hints.done():
                    self._begin_with_hints(request, text)
                if request.namespace in paused:
                    if self._limits.has_network:
                        request.skip(len(text))
                    continue
                turn = self._turn(index, request, text, networks[index])
                if turn is None:
                    continue
                if turn.added or not request.draft:
                    by_namespace.setdefault(id(request.namespace), []).append(turn)
                else:  # The host has not run the request since it got this draft.
                    request.verified = None
                    drafts[index] = request.draft.cut(turn.room)
            for turns in by_namespace.values():
                others = len(texts) - len(turns) + other_sequences
                for turn, draft in zip(turns, self._draft(turns, others, prompt_tokens), strict=True):
                    drafts[turn.index] = draft
        return drafts

    def finish(self, request_id: Hashable, text: Sequence[int] | None = None, end: End = End.FINISHED) -> None:
        """End a request, if it is running. text: its whole text; None if the host does not give it any more."""
        with self.guarded():
            request = self._requests.pop(request_id, None)
            if request is None:
                return
            if (hints := request.hints) is not None:
                if text is not None:
                    self._begin_with_hints(request, text)
                hints.cancel()
            if request.namespace is None:
                return
            turn = None if text is None or len(text) < request.reported else self._turn(0, request, text)
            self._end(request, turn, learn=request.options.learns_after(end))

    def close(self) -> None:
        """Close the drafters. Running requests are not learned."""
        with self.guarded():
            for request_id in list(self._requests):
                self._drop(request_id)
            self._hints.close()
            self.namespaces.close()

    def guarded(self) -> Guard:
        """Return a context that suppresses exceptions, so that none reaches the host; they are counted and reported.

        A plug-in also runs its own code in this context. One thread at a time can enter it.
        """
        return self._guard

    # With the lock.

    def _fail(self, problem: Exception) -> None:
        """Count and report a failure. The text of an unexpected one may hold tokens of users."""
        self.counters.failures += 1
        if isinstance(problem, UserError):
            self._report_once("user error", f"{problem}; continuing without drafts")
            return
        if (end := self._failures.add()) is None:
            return
        place = problem.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = f" at {Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}" if place else ""
        self._write(f"drafting failed ({type(problem).__name__}{where}); {end}")

    def _report_once(self, kind: str, message: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._write(message)

    def _write(self, message: str) -> None:
        with suppress(Exception):  # The host's log must not stop the host either.
            self._report(message)

    def _begin(self, request: TrackedRequest, prompt: np.ndarray) -> None:
        """Start a sequence for a request, unless its options or its prompt forbid it, or drafting is switched off."""
        if self._failures.is_off or (self._limits.has_network and self._combination is None):
            return
        options = request.options
        hints = valid_prefix(options.hints, self._vocab_size)
        if len(valid_prefix(prompt, self._vocab_size)) < len(prompt) or len(hints) < len(options.hints):
            self._report_once(
                "prompt", "a prompt or hints with token ids outside of the vocabulary; the request has no drafts"
            )
            return
        namespace = self.namespaces.find(options.adapter, options.salt)
        if namespace is None:
            self._report_once("namespaces", "too many cache salts and adapters at a time; some requests have no drafts")
        if namespace is None or namespace.drafter is None:
            return
        namespace.drafter.start(
            self._sequences,
            prompt.astype(np.uint32),
            hints=np.array(hints, np.uint32) if len(hints) else None,
            session_id=options.session_id,
            learn=not options.private,
            rollout=options.rollout,
        )
        namespace.running += 1
        request.begin(namespace, self._sequences, prompt)
        self._sequences += 1

    def _begin_with_hints(self, request: TrackedRequest, text: Sequence[int]) -> None:
        """Start a sequence for a request that waited for its hints; without them if they are still not tokenized."""
        hints, request.hints = request.hints, None
        if hints is not None and hints.done():
            request.options = replace(request.options, hints=hints.result())
        self._begin(request, np.array(text[: request.prompt_length], np.int64))

    def _turn(
        self, index: int, request: TrackedRequest, text: Sequence[int], network: Sequence[int] = ()
    ) -> Turn | None:
        """Return the progress of a request; None if it has no drafts."""
        if request.namespace is None:
            return None
        length, checked = len(text), len(request.tail)
        known = text[request.reported - checked :]  # One slice: those of hosts take a function call of their own.
        if length < request.reported or list(known[:checked]) != request.tail:
            self._restart(request, text)
            if request.namespace is None:
                return None
            known, checked = text[request.reported :], 0
        new = known[checked:]
        added = valid_prefix(new, self._vocab_size)
        room = request.room(length, self._limits.max_draft) if len(added) == len(new) else 0
        verified, accepted, resolved = request.outcome(added)
        steps = request.skipped + (length > request.seen) if request.skipped else max(1, len(added) - accepted)
        return Turn(request, index, added, room, verified, accepted, resolved, steps, network[:room])

    def _restart(self, request: TrackedRequest, text: Sequence[int]) -> None:
        """Begin a request again whose text is not what was reported: the host took output back, or used an id twice."""
        self._end(request, None, learn=False)
        prompt = np.array(text[: request.prompt_length], np.int64)
        if request.has_prompt(prompt):
            self._begin(request, prompt)
        else:
            self._report_once("prompt changed", "a request's prompt changed while it ran; it has no more drafts")

    def _draft(self, turns: list[Turn], others: int, prompt_tokens: int) -> list[Draft]:
        """Report the progress of requests of one namespace; return their drafts.

        others: number of sequences in the same step that are not among them.
        """
        namespace = turns[0].request.namespace
        assert namespace is not None
        assert namespace.drafter is not None
        try:
            began = perf_counter()
            progress = progress_of(turns, others, prompt_tokens, namespace.step_times)
            namespace.step_times = []
            if self._combination is not None:
                progress.min_path_prob = self._combination.min_path_prob(turns, others, prompt_tokens)
            batch = namespace.drafter.draft(progress)
            drafts = drafts_of(batch, [turn.room for turn in turns], self._vocab_size, is_tree=self._limits.trees)
            for turn in turns:
                self._commit(turn)
            if self._combination is not None:
                drafts = self._combination.choose(turns, batch, drafts, namespace.drafter.draft_after)
            namespace.drafting_s, namespace.pause_steps = perf_counter() - began, batch.pause_steps
        except Exception as problem:
            for turn in turns:
                with suppress(Exception):  # Its state at the drafter is unknown. The cause is reported below.
                    self._end(turn.request, None, learn=False)
            self._fail(problem)
            return [path_of(turn.network) for turn in turns]
        self._failures.succeeded()
        for turn, draft in zip(turns, drafts, strict=True):
            turn.request.draft = draft
            self.counters.drafted += len(draft.tokens)
        return drafts

    def _commit(self, turn: Turn) -> None:
        """Record that the drafter knows the tokens of a turn."""
        if not turn.added:
            return
        self.counters.steps += turn.steps
        self.counters.verified += turn.verified
        self.counters.accepted += turn.accepted
        if self._combination is not None:
            self._combination.learn(turn.request, turn.added)
        turn.request.commit(turn.added)

    def _drop(self, request_id: Hashable) -> None:
        """Forget a request without learning it."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            if request.hints is not None:
                request.hints.cancel()
            self._end(request, None, learn=False)

    def _end(self, request: TrackedRequest, turn: Turn | None, *, learn: bool) -> None:
        """End a request's sequence. turn: its last tokens; None if there are none."""
        namespace, request.namespace = request.namespace, None
        if namespace is None or namespace.drafter is None:
            return
        namespace.running -= 1
        if turn is None:
            namespace.drafter.finish(request.sequence_id, np.empty(0, np.uint32), learn=learn)
            return
        self._commit(turn)
        namespace.drafter.finish(
            request.sequence_id,
            np.array(turn.added, np.uint32),
            verified=turn.resolved,
            steps=turn.steps,
            learn=learn,
        )
