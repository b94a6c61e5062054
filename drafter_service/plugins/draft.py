"""Drafts as hosts take them (plain ints, within the vocabulary), and what a session keeps of each request."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from drafter_service.plugins.namespaces import Namespace
from drafter_service.plugins.options import RequestOptions
from ssd.types import ROOT, UINT32, DraftBatch, Progress, StepTime

if TYPE_CHECKING:  # It imports numba.
    from ssd.merged_tree import Evaluation, Tree

MAX_LENGTH = 1 << 30
"""Length of texts, in tokens, that no host reaches."""
CHECKED = 8
"""Number of reported tokens that are compared with the host's text in each step, to notice that it was replaced."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft tokens of one request, parents before their children."""

    tokens: list[int]
    parents: list[int]
    """Index of each token's parent in `tokens`; `ROOT` for a token that follows the text."""
    accept_prob: list[float] = field(default_factory=list, compare=False)
    """Probability that each token is accepted, given that its parent is; empty if it was not
    estimated, as for a draft of the host's network in place of the drafter's."""

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def cut(self, length: int) -> Draft:
        """Return the first `length` tokens, which are a draft too."""
        return Draft(self.tokens[:length], self.parents[:length], self.accept_prob[:length])

    def accepted(self, text: Sequence[int], verified: int) -> int:
        """Return how many tokens at the start of `text` are a path among the first `verified` tokens."""
        length, at, end = 0, ROOT, len(text)
        for node, (token, parent) in enumerate(zip(self.tokens[:verified], self.parents, strict=False)):
            if parent == at and length < end and token == text[length]:
                length, at = length + 1, node
        return length


NO_DRAFT = Draft([], [])


def path_of(tokens: Sequence[int], accept_prob: Sequence[float] = ()) -> Draft:
    """Return a draft without branches."""
    return Draft([*tokens], [*range(ROOT, len(tokens) + ROOT)], [*accept_prob])


def drafts_of(batch: DraftBatch, rooms: Sequence[int], vocab_size: int, *, is_tree: bool) -> list[Draft]:
    """Return the draft of each sequence of a batch, of at most `rooms` tokens.

    It ends before the first token that is not in the vocabulary or, unless is_tree, that does not continue a path.
    """
    tokens, parents, offsets = batch.tokens.tolist(), batch.parents.tolist(), batch.offsets.tolist()
    accept_prob = batch.accept_prob.tolist()
    drafts = []
    for (start, end), room in zip(pairwise(offsets), rooms, strict=True):
        if start == end:
            drafts.append(NO_DRAFT)
            continue
        end = start + len(valid_prefix(tokens[start : min(end, start + room)], vocab_size))
        path = [*range(ROOT, end - start + ROOT)]
        if not is_tree and parents[start:end] != path:
            end = start + common_length(parents[start:end], path)
        drafts.append(Draft(tokens[start:end], parents[start:end], accept_prob[start:end]))
    return drafts


# --- Requests of a session


@dataclass(slots=True, eq=False)
class Proposed:
    """What was proposed to a request by the corpus and by the host's own network, of which a part is the draft."""

    corpus: Sequence[int]
    network: Sequence[int]
    tree: Tree
    """All candidates."""
    found: Evaluation


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A request of the host, and what the drafter knows of it."""

    options: RequestOptions
    prompt_length: int
    prompt_checksum: int
    max_length: int
    """Length of its text, prompt included, at which the host ends it."""
    hints: Future[Any] | None = None
    """Its hints that are being tokenized, uint32 [N], before which it does not begin; None if there are none."""
    namespace: Namespace | None = None
    """None if it has no drafts."""
    sequence_id: int = -1
    """Its id at the drafter."""
    reported: int = 0
    """Number of tokens that the drafter knows, prompt included."""
    tail: list[int] = field(default_factory=list)
    """The last `CHECKED` of them."""
    draft: Draft = NO_DRAFT
    """The last draft, which continues the reported tokens."""
    verified: int | None = None
    """Number of its tokens that the host verifies; None: the host has not said."""
    proposed: Proposed | None = None
    """What the last draft was chosen from, if the host has a network of its own."""
    skipped: int = 0
    """Number of the host's steps since the last draft, while its drafter was not called."""
    seen: int = 0
    """Length of its text in the last of them."""

    @classmethod
    def of(cls, prompt: np.ndarray, options: RequestOptions, context_window: int | None) -> TrackedRequest:
        """Return a request of which the drafter does not know yet; prompt: int64 [N]."""
        longest, length = context_window or MAX_LENGTH, len(prompt)
        longest = longest if options.max_tokens is None else min(longest, length + options.max_tokens)
        return cls(options, length, crc32(prompt.data), longest)

    def has_prompt(self, prompt: np.ndarray) -> bool:
        """Return whether this is its prompt, int64 [N]."""
        return len(prompt) == self.prompt_length and crc32(prompt.data) == self.prompt_checksum

    def begin(self, namespace: Namespace, sequence_id: int, prompt: np.ndarray) -> None:
        """Record that a drafter knows the prompt."""
        self.namespace, self.sequence_id = namespace, sequence_id
        self.reported, self.tail = len(prompt), prompt[-CHECKED:].tolist()
        self._reset()

    def skip(self, length: int) -> None:
        """Record a step of the host in which its drafter is not called; length: that of its text."""
        self.skipped += length > max(self.seen, self.reported)
        self.seen = length

    def schedule(self, tokens: Sequence[int]) -> None:
        """Record which tokens the host verifies in the step that it begins, see `HostSession.schedule`."""
        if self.draft and self.verified is None:
            self.verified = common_length(self.draft.tokens, tokens)

    def room(self, length: int, max_draft: int) -> int:
        """Return the maximum draft length after `length` tokens. A step adds one token to the accepted ones."""
        room = min(max_draft, self.max_length - length - 1)
        return max(0, room if self.options.max_draft is None else min(room, self.options.max_draft))

    def commit(self, added: Sequence[int]) -> None:
        """Record that the drafter knows these tokens, too."""
        self.reported += len(added)
        self.tail = [*(self.tail if len(added) < CHECKED else ()), *added[-CHECKED:]][-CHECKED:]
        self._reset()

    def outcome(self, added: Sequence[int]) -> tuple[int, int, int]:
        """Return the numbers of verified and of accepted tokens of the last draft, given the tokens after it, and the
        number of tokens of the drafter's own draft whose result is known.
        """
        verified = (self.verified or 0) if added else 0
        accepted = self.draft.accepted(added, verified) if verified else 0
        if self.proposed is None:
            return verified, accepted, verified
        own = self.proposed.corpus
        return verified, accepted, min(common_length(own, added) + 1, len(own), len(added))

    def _reset(self) -> None:
        """Forget the last draft, because the text has grown."""
        self.draft, self.verified, self.proposed, self.skipped = NO_DRAFT, None, None, 0


@dataclass(slots=True, eq=False)
class Turn:
    """Progress of a request in one step of the host."""

    request: TrackedRequest
    index: int
    """Index in the host's batch."""
    added: Sequence[int]
    """Tokens that the drafter does not know."""
    room: int
    """Maximum length of its next draft."""
    verified: int
    """Number of verified tokens of its last draft; 0 while no token was committed after it."""
    accepted: int
    """Number of accepted ones among them."""
    resolved: int
    """Number of tokens of the drafter's own last draft whose result is known."""
    steps: int
    """Number of the host's steps: the first added one token to the accepted ones, the others one token each."""
    network: Sequence[int]
    """The draft of the host's own network, of at most `room` tokens."""


def progress_of(turns: Sequence[Turn], others: int, prompt_tokens: int, step_times: Sequence[StepTime]) -> Progress:
    """Return the progress of requests of one namespace; others: number of other sequences in the step."""
    count, steps = len(turns), [turn.steps for turn in turns]
    numbers = [turn.room for turn in turns]
    numbers += [turn.resolved for turn in turns]
    numbers += steps
    numbers += accumulate([len(turn.added) for turn in turns], initial=0)
    for turn in turns:
        numbers += turn.added
    # Parts of one array: making an array takes longer than all else here.
    array = np.array(numbers, UINT32)
    return Progress(
        sequence_ids=np.array([turn.request.sequence_id for turn in turns], np.uint64),
        tokens=array[4 * count + 1 :],
        offsets=array[3 * count : 4 * count + 1],
        verified=array[count : 2 * count],
        max_draft=array[:count],
        steps=array[2 * count : 3 * count] if max(steps) > 1 else None,
        other_tokens=prompt_tokens,
        other_sequences=others,
        step_times=step_times,
    )


def valid_prefix(tokens: Any, vocab_size: int) -> Any:
    """Return the tokens of a sequence or an array before the first id that is not in the vocabulary."""
    if isinstance(tokens, np.ndarray):
        outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
        return tokens[: outside[0]] if len(outside) else tokens
    if not len(tokens) or (min(tokens) >= 0 and max(tokens) < vocab_size):
        return tokens
    return tokens[: next(at for at, token in enumerate(tokens) if not 0 <= token < vocab_size)]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length
