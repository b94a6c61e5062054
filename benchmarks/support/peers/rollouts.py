"""Drafters for rollouts of reinforcement learning, from earlier answers to the same problem. All are re-implemented.

The problem is the request's group, or without one its prompt. Requests without a version are all of one version.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from benchmarks.support.peers.arctic import Arctic
from benchmarks.support.peers.text_drafter import Answer, TextDrafter, path
from drafter_service.commands.advise.arctic import OneByOne

NO_VERSION = -1

T = TypeVar("T")


def problem_of(prompt: np.ndarray, group: str | None) -> Hashable:
    """Return what identifies the problem of a request."""
    return prompt.tobytes() if group is None else group


class Das(OneByOne):
    """DAS (Shao et al., "Beat the long tail", 2026): a suffix tree per problem, of the answers of its last versions.

    Re-implemented from public descriptions with the trees of Arctic Inference: their rules for the length and the least
    probability of a draft, and as in Arctic answers are in the tree while they grow, and each request has a tree of its
    own text. The original's budgets by expected length are left out.
    """

    def __init__(self, window: int | None, factor: float, least_prob: float, *, is_tree: bool) -> None:
        """window: number of the problem's versions before the current one whose answers are kept; None: all."""
        self._window = window
        new = functools.partial(Arctic, factor, least_prob, is_tree=is_tree)
        self._trees: dict[Hashable, Arctic] = defaultdict(new)
        self._versions: dict[Hashable, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        """Sequences in the tree of each problem, by version."""
        self._running: dict[int, Arctic] = {}

    def start(
        self, sequence_id: int, prompt: np.ndarray, *, group: str | None = None, version: int | None = None
    ) -> None:
        """Begin a sequence, and remove answers that are older than the window."""
        problem = problem_of(prompt, group)
        tree, versions = self._trees[problem], self._versions[problem]
        tree.start(sequence_id, prompt)
        self._running[sequence_id] = tree
        versions[NO_VERSION if version is None else version].append(sequence_id)
        while self._window is not None and len(versions) > self._window + 1:
            for old in versions.pop(min(versions)):
                tree.forget(old)

    def commit(self, sequence_id: int, tokens: np.ndarray) -> None:
        """Commit tokens, uint32 [n]."""
        self._running[sequence_id].commit(sequence_id, tokens)

    def speculate(self, sequence_id: int, limit: int) -> Any:
        """Return a draft of at most `limit` tokens."""
        return self._running[sequence_id].speculate(sequence_id, limit)

    def end(self, sequence_id: int) -> None:
        """End a sequence; its answer stays in the tree."""
        self._running.pop(sequence_id).end(sequence_id)


class FromPreviousVersion(TextDrafter, Generic[T]):
    """Base of drafters that draft from the answers of the problem's previous version; without versions, from earlier
    answers.
    """

    def __init__(self, new: Callable[[], T]) -> None:
        """new: returns an empty store of the answers of one problem and version."""
        super().__init__()
        self._new = new
        self._stores: dict[Hashable, dict[int, T]] = defaultdict(dict)
        self._own: dict[int, T] = {}
        self._previous: dict[int, T] = {}

    def start(
        self, sequence_id: int, prompt: np.ndarray, *, group: str | None = None, version: int | None = None
    ) -> None:
        """Begin a sequence with its prompt."""
        super().start(sequence_id, prompt)
        stores = self._stores[problem_of(prompt, group)]
        now = NO_VERSION if version is None else version
        self._own[sequence_id] = stores.setdefault(now, self._new())
        earlier = [number for number in stores if number < now or version is None]
        self._previous[sequence_id] = stores[max(earlier)] if earlier else self._new()

    def end(self, sequence_id: int) -> None:
        """End a sequence."""
        super().end(sequence_id)
        del self._own[sequence_id], self._previous[sequence_id]


class SpecRl(FromPreviousVersion[Any]):
    """The recipe specRL of verl (verl-project/verl#4535): a suffix tree of a prompt and the previous version's answers.

    Drafts the most frequent continuation of the longest match of at most 7 tokens, while its probability is at least
    0.1. Drafts have 2 tokens; the limit is doubled when all of a draft was accepted, else halved.
    """

    MATCHES: ClassVar = (7, 6, 5, 4)
    LEAST_PROB: ClassVar = 0.1
    SHORTEST_DRAFT: ClassVar = 2
    LONGEST_DRAFT: ClassVar = 16
    PROMPT_END: ClassVar = 5
    """Prompt tokens before each answer in the tree."""

    def __init__(self) -> None:
        from arctic_inference.suffix_decoding._C import SuffixTree

        super().__init__(lambda: SuffixTree(self.MATCHES[0] + self.LONGEST_DRAFT + 1))
        self._limits: dict[int, int] = defaultdict(lambda: self.SHORTEST_DRAFT)

    def commit(self, sequence_id: int, tokens: np.ndarray) -> None:
        """Commit tokens, and choose the limit of the next draft."""
        super().commit(sequence_id, tokens)
        limit = self._limits[sequence_id]
        limit = limit * 2 if len(tokens) > limit else limit // 2
        self._limits[sequence_id] = min(max(limit, self.SHORTEST_DRAFT), self.LONGEST_DRAFT)

    def speculate(self, sequence_id: int, limit: int) -> Any:
        """Return the draft of the longest match that has one."""
        limit, tree = min(limit, self._limits[sequence_id]), self._previous[sequence_id]
        for length in self.MATCHES:
            # The tree looks for all matches shorter than the context. The offset leaves shorter ones no tokens.
            context = self.texts[sequence_id].last(length + 1)
            draft = tree.speculate(context, limit, limit, -limit * (length - 1), self.LEAST_PROB, False)
            if draft.token_ids:
                return draft
        return path([])

    def end(self, sequence_id: int) -> None:
        """End a sequence, and add its answer to the tree of its version."""
        text, tree = self.texts[sequence_id], self._own[sequence_id]
        if tree.num_seqs() == 0:
            tree.extend(0, text.tokens[: text.prompt_length].tolist())
        tree.extend(tree.num_seqs(), text.last(text.length - text.prompt_length + self.PROMPT_END))
        super().end(sequence_id)
        self._limits.pop(sequence_id, None)


class PreviousAnswer(FromPreviousVersion[list[list[int]]]):
    """Drafts the previous answer to the same problem, from the place where the own text agrees with it.

    The previous answer is that of the previous version's sample with the same number, in order of start, or else of its
    last sample. While the text agrees with it, the place follows. After a mismatch, the last n tokens of the text are
    searched for, first after the old place.
    """

    def __init__(self, n: int) -> None:
        """n: number of tokens that are searched for after a mismatch."""
        super().__init__(list)
        self._n = n
        self._numbers: dict[int, int] = {}
        self._answers: dict[int, list[int]] = {}
        self._places: dict[int, tuple[int, bool]] = {}
        """Place in the previous answer, and whether the text agrees with it there."""

    def start(
        self, sequence_id: int, prompt: np.ndarray, *, group: str | None = None, version: int | None = None
    ) -> None:
        """Begin a sequence at the beginning of the previous answer."""
        super().start(sequence_id, prompt, group=group, version=version)
        own, previous = self._own[sequence_id], self._previous[sequence_id]
        number = self._numbers[sequence_id] = len(own)
        # Empty until the sequence ends.
        own.append([])
        ended = [answer for answer in [*previous, *previous[number : number + 1]] if answer]
        self._answers[sequence_id] = ended[-1] if ended else []
        self._places[sequence_id] = 0, True

    def commit(self, sequence_id: int, tokens: np.ndarray) -> None:
        """Commit tokens, and follow the previous answer."""
        answer = self._answers[sequence_id]
        for at, token in enumerate(tokens.tolist()):
            super().commit(sequence_id, tokens[at : at + 1])
            place, agrees = self._places[sequence_id]
            if agrees and answer[place : place + 1] == [token]:
                self._places[sequence_id] = place + 1, True
            else:
                self._places[sequence_id] = self._search(sequence_id, place)

    def _search(self, sequence_id: int, place: int) -> tuple[int, bool]:
        answer, last = self._answers[sequence_id], self.texts[sequence_id].last(self._n)
        ends = [end for end in range(self._n, len(answer) + 1) if answer[end - self._n : end] == last]
        return next((end for end in ends if end > place), ends[0] if ends else place), bool(ends)

    def speculate(self, sequence_id: int, limit: int) -> Answer:
        """Return the next tokens of the previous answer, if the text agrees with it."""
        place, agrees = self._places[sequence_id]
        return path(self._answers[sequence_id][place : place + limit] if agrees else [])

    def end(self, sequence_id: int) -> None:
        """End a sequence, and remember its answer."""
        text = self.texts[sequence_id]
        self._own[sequence_id][self._numbers.pop(sequence_id)] = text.tokens[text.prompt_length :].tolist()
        super().end(sequence_id)
        del self._answers[sequence_id], self._places[sequence_id]
