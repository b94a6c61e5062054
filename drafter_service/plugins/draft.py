"""Drafts as hosts take them (plain ints, within the vocabulary), and what a session keeps of each request."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np

from drafter_service.plugins.namespaces import Namespace
from drafter_service.plugins.options import RequestOptions
from ssd.types import ROOT, DraftBatch, Progress, StepTime, offsets_of

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

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def cut(self, length: int) -> Draft:
        """Return the first `length` tokens, which are a draft too."""
        return Draft(self.tokens[:length], self.parents[:length])

    def accepted(self, text: Sequence[int], verified: int) -> int:
        """Return how many tokens at the start of `text` are a path among the first `verified` tokens."""
        length, at, tokens, parents = 0, ROOT, self.tokens, self.parents
        for node in range(min(verified, len(tokens))):
            if length == len(text):
                break
            if parents[node] == at and tokens[node] == text[length]:
                length, at = length + 1, node
        return length


NO_DRAFT = Draft([], [])


def drafts_of(batch: DraftBatch, rooms: Sequence[int], vocab_size: int, *, is_tree: bool) -> list[Draft]:
    """Return the draft of each sequence of a batch, of at most `rooms` tokens.

    It ends before the first token that is not in the vocabulary or, unless is_tree, that does not continue a path.
    """
    tokens, parents, offsets = batch.tokens.tolist(), batch.parents.tolist(), batch.offsets.tolist()
    drafts = []
    for (start, end), room in zip(pairwise(offsets), rooms, strict=True):
        if start == end:
            drafts.append(NO_DRAFT)
            continue
        draft = Draft(tokens[start : min(end, start + room)], parents[start : min(end, start + room)])
        drafts.append(draft.cut(_valid_length(draft, vocab_size, is_tree)))
    return drafts


def _valid_length(draft: Draft, vocab_size: int, is_tree: bool) -> int:
    """Return how many tokens at the start of a draft a host can verify."""
    for at, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if token >= vocab_size or not (is_tree or parent == at + ROOT):
            return at
    return len(draft.tokens)


# --- Requests of a session


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A request of the host, and what the drafter knows of it."""

    options: RequestOptions
    prompt_length: int
    prompt_checksum: int
    max_length: int
    """Length of its text, prompt included, at which the host ends it."""
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
    allowed: int = MAX_LENGTH
    """Longest draft that the host is expected to verify."""

    @classmethod
    def of(cls, prompt: Sequence[int], options: RequestOptions, context_window: int | None) -> TrackedRequest:
        """Return a request of which the drafter does not know yet."""
        longest, length = context_window or MAX_LENGTH, len(prompt)
        longest = longest if options.max_tokens is None else min(longest, length + options.max_tokens)
        return cls(options, length, checksum(prompt), longest)

    def has_prompt(self, prompt: Sequence[int]) -> bool:
        """Return whether this is its prompt."""
        return len(prompt) == self.prompt_length and checksum(prompt) == self.prompt_checksum

    def begin(self, namespace: Namespace, sequence_id: int, prompt: Sequence[int]) -> None:
        """Record that a drafter knows the prompt."""
        self.namespace, self.sequence_id = namespace, sequence_id
        self.reported, self.tail = len(prompt), list(prompt[-CHECKED:])
        self.draft, self.verified = NO_DRAFT, None

    def schedule(self, tokens: Sequence[int], offered: int | None) -> None:
        """Record which tokens the host verifies in the step that it begins, see `HostSession.schedule`."""
        if self.verified is not None or not (draft := self.draft.tokens):
            return
        self.verified = verified = common_length(draft, tokens)
        if verified == len(draft):
            self.allowed = max(self.allowed, 2 * verified)
        elif verified == len(tokens) != offered:  # The host cut it, and did not replace it.
            self.allowed = max(1, verified)

    def room(self, length: int, max_draft: int) -> int:
        """Return the maximum draft length after `length` tokens. A step adds one token to the accepted ones."""
        room = min(max_draft, self.allowed, self.max_length - length - 1)
        return max(0, room if self.options.max_draft is None else min(room, self.options.max_draft))

    def commit(self, added: Sequence[int]) -> None:
        """Record that the drafter knows these tokens, too."""
        self.reported += len(added)
        self.tail = [*self.tail, *added[-CHECKED:]][-CHECKED:]
        self.draft, self.verified = NO_DRAFT, None


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
    steps: int
    """Number of the host's steps: the first added one token to the accepted ones, the others one token each."""


def progress_of(turns: Sequence[Turn], others: int, prompt_tokens: int, step_times: Sequence[StepTime]) -> Progress:
    """Return the progress of requests of one namespace; others: number of other sequences in the step."""
    steps = np.array([turn.steps for turn in turns], np.uint32)
    return Progress(
        sequence_ids=np.array([turn.request.sequence_id for turn in turns], np.uint64),
        tokens=np.array([*chain.from_iterable(turn.added for turn in turns)], np.uint32),
        offsets=offsets_of(np.array([len(turn.added) for turn in turns], np.uint32)),
        verified=np.array([turn.verified for turn in turns], np.uint32),
        max_draft=np.array([turn.room for turn in turns], np.uint32),
        steps=steps if np.count_nonzero(steps > 1) else None,
        other_tokens=prompt_tokens,
        other_sequences=others,
        step_times=step_times,
    )


def valid_prefix(tokens: Sequence[int], vocab_size: int) -> Sequence[int]:
    """Return the tokens before the first id that is not in the vocabulary."""
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


def checksum(tokens: Sequence[int]) -> int:
    """Return a checksum of token ids."""
    return zlib.crc32(np.asarray(tokens, np.int64).tobytes())
