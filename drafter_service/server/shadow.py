"""Shadow mode: drafts that are withheld, and scored against the tokens that come instead.

An engine that verifies drafts requests the next one after the accepted tokens of the last one and one more token. So a
withheld draft is kept until that many tokens have arrived, which are then committed as one step.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from drafter_service.server.namespace import Namespace
from drafter_service.server.requests import read_texts
from drafter_service.stubs import drafter_pb2 as pb
from ssd.drafter import SuffixDrafter
from ssd.sequences.running import RunningById
from ssd.types import Progress, offsets_of

MAX_WAITING = 256
"""Tokens of a sequence that may wait for a step, more than a draft has. If an engine sends more at once, they count as
steps without drafts, so that a message takes a limited time."""

NO_TOKENS = np.empty(0, np.uint32)


@dataclass(slots=True, eq=False)
class Withheld:
    """A sequence whose drafts are withheld."""

    tokens: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    """uint32 [n]: tokens that no step has committed yet."""
    has_draft: bool = False
    """Whether it was drafted for, even if the draft was empty."""
    max_draft: int = 0
    """Maximum length of its next draft."""


class Step(NamedTuple):
    """Tokens that a sequence commits together."""

    tokens: int
    """Number of tokens."""
    steps: int
    """Number of steps that a target needs for them; the draft is verified in the first."""


class ShadowDrafter:
    """Requests drafts as an engine that verifies them does; the result is in the drafter's `stats`."""

    def __init__(self, drafter: SuffixDrafter) -> None:
        self.drafter = drafter
        self._sequences: dict[int, Withheld] = {}

    @property
    def running(self) -> RunningById:
        """The running sequences."""
        return self.drafter.running

    def start(self, sequence_id: int, prompt: np.ndarray, **options: Any) -> None:
        """Begin a sequence, see `CorpusDrafter.start`."""
        self.drafter.start(sequence_id, prompt, **options)
        self._sequences[sequence_id] = Withheld()

    def advance(self, batch: Progress) -> None:
        """Add the tokens of a batch of these sequences, and make the steps whose outcomes they decide.

        `verified`, `steps` and `step_times` of the batch have no effect.
        """
        ids, bounds = batch.sequence_ids.tolist(), batch.offsets.tolist()
        for index, (sequence_id, limit) in enumerate(zip(ids, batch.max_draft.tolist(), strict=True)):
            sequence = self._sequences[sequence_id]
            sequence.tokens = np.concatenate([sequence.tokens, batch.tokens[bounds[index] : bounds[index + 1]]])
            sequence.max_draft = limit
        while decided := {each: step for each in ids if (step := self._next_step(each)) is not None}:
            self._commit(decided, batch)
            ids = list(decided)

    def finish(self, sequence_id: int, tokens: np.ndarray, *, learn: bool) -> None:
        """End a sequence; tokens: uint32 [n], those since its last batch. learn: see `CorpusDrafter.finish`."""
        if len(tokens):
            limit = self._sequences[sequence_id].max_draft
            self.advance(Progress.of_one(sequence_id, tokens, max_draft=limit))
        rest = self._sequences.pop(sequence_id).tokens
        verified = self._offered(sequence_id) if len(rest) else 0
        self.drafter.finish(sequence_id, rest, verified=verified, learn=learn)

    def size_of(self, sequence_id: int) -> int:
        """Return the number of tokens of a sequence, prompt included."""
        return self.drafter.running.size_of(sequence_id) + len(self._sequences[sequence_id].tokens)

    def _next_step(self, sequence_id: int) -> Step | None:
        """Return the next step of a sequence, without tokens before its first draft; None if it is not decided yet."""
        sequence = self._sequences[sequence_id]
        size = len(sequence.tokens)
        if not size:
            return None if sequence.has_draft else Step(0, 1)
        offered = self._offered(sequence_id)
        accepted = self.drafter.running.accepted(sequence_id, sequence.tokens[: offered + 1], offered)
        if size > MAX_WAITING:
            return Step(size, size - accepted)
        return Step(accepted + 1, 1) if accepted < size else None

    def _commit(self, steps: dict[int, Step], batch: Progress) -> None:
        """Commit a step of each sequence, and draft for the next one; batch: where their tokens came from."""
        ids, sizes = list(steps), [step.tokens for step in steps.values()]
        sequences = [self._sequences[sequence_id] for sequence_id in ids]
        progress = Progress(
            sequence_ids=np.array(ids, np.uint64),
            tokens=np.concatenate([each.tokens[:size] for each, size in zip(sequences, sizes, strict=True)]),
            offsets=offsets_of(np.array(sizes, np.uint32)),
            verified=self.drafter.running.offered_to(ids).astype(np.uint32),
            max_draft=np.array([each.max_draft for each in sequences], np.uint32),
            cost=batch.cost,
            steps=np.array([step.steps for step in steps.values()], np.uint32),
            other_tokens=batch.other_tokens,
            other_sequences=batch.other_sequences,
            min_path_prob=batch.min_path_prob,
        )
        self.drafter.draft(progress)
        self.drafter.running.record_use()
        for each, size in zip(sequences, sizes, strict=True):
            each.tokens, each.has_draft = each.tokens[size:], True

    def _offered(self, sequence_id: int) -> int:
        return int(self.drafter.running.offered_to([sequence_id])[0])


TEXTS_PER_TURN = 256
"""Number of texts learned before other tasks of the event loop run."""
SCORED_PER_TURN = 32
"""Number of output tokens scored before other tasks of the event loop run: about 0.5 ms."""


async def learn(namespace: Namespace, message: pb.Texts, total: pb.ObserveResponse) -> None:
    """Learn finished texts at the rate of the index, and add their counts to `total`.

    Raises WireError, with no effect, for an invalid message, and ClosedError.
    """
    texts = read_texts(message, namespace.model.vocab_size)
    kept = namespace.config.learned_prompt_tokens
    for index, name in enumerate(texts.request_ids):
        if index % TEXTS_PER_TURN == 0:
            await asyncio.sleep(0)
        await namespace.wait_for_room()
        text = texts.text(index)
        if texts.prompt_lengths is not None and not namespace.has_learned(name):
            prompt_length = texts.prompt_lengths[index]
            namespace.shadow.observed += 1
            if prompt_length < len(text) and namespace.shadow_budget.is_left():
                await _score(namespace, text[:prompt_length], text[prompt_length:])
            if prompt_length > kept:
                text = text[prompt_length - kept :]
        if namespace.learn(text, name, texts.tags[index], finished_at=texts.times[index]):
            total.tokens += len(text)
            total.texts += 1
        else:
            total.duplicates += 1


async def _score(namespace: Namespace, prompt: np.ndarray, output: np.ndarray) -> None:
    """Replay a finished request; its output, uint32 [n], is used as the tokens of the target.

    prompt: uint32 [P]. Raises ClosedError.
    """
    budget, drafter = namespace.shadow_budget, namespace.new_drafter(stats=namespace.shadow.stats)
    shadow, limit = ShadowDrafter(drafter), namespace.config.max_draft
    try:
        with budget.spend():
            shadow.start(0, prompt, learn=False)
            if drafter.is_sorting:
                await asyncio.to_thread(drafter.wait_for_sorting)
                namespace.check_is_open()
            shadow.advance(Progress.of_one(0, NO_TOKENS, max_draft=limit))
        for first in range(0, len(output), SCORED_PER_TURN):
            with budget.spend():
                shadow.advance(Progress.of_one(0, output[first : first + SCORED_PER_TURN], max_draft=limit))
            await asyncio.sleep(0)
            namespace.check_is_open()
        shadow.finish(0, NO_TOKENS, learn=False)
        namespace.shadow.scored += 1
    finally:
        namespace.release(drafter)
