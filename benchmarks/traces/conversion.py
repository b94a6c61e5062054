"""Turn conversations into the arrays of a trace: encode them, leave out loops, and put their requests in order.

Sessions are shuffled with `random.Random(0)`. Conversations of several turns interleave: eight run at once, and a
random one of them makes the next request.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.traces.formats import Conversation
from benchmarks.traces.vocabularies import ChatEncoder

AT_ONCE = 8
SEED = 0
LOOPS = ((1024, 8, 0.5), (256, 4, 0.25))
"""An output that was cut off loops if, of the n-grams in its last tokens, too few are different: (tokens, n, share)."""

Arrays = dict[str, np.ndarray]
"""The arrays of a trace by name: `tokens`, uint32, and for each request int32 `prompt_len`, `output_len`, `session`,
`turn`, `group` (task) and `shared_prefix` (leading tokens equal to the session's previous prompt and output)."""


@dataclass(frozen=True)
class Limits:
    """Lengths from which an output counts as cut off; it then has no token that ends it.

    They are a few tokens below the limit of the original run, whose tokens are not known exactly.
    """

    output_tokens: int | None = None
    total_tokens: int | None = None
    """Length of prompt and output."""

    def cut(self, prompt: int, output: int) -> bool:
        """Return whether an output of `output` tokens after a prompt of `prompt` tokens was cut off."""
        return (self.output_tokens is not None and output >= self.output_tokens) or (
            self.total_tokens is not None and prompt + output >= self.total_tokens
        )


@dataclass(frozen=True)
class Session:
    """The requests of a conversation as (prompt, output), in order."""

    turns: list[tuple[list[int], list[int]]]
    task: str
    stage: int


def convert(conversations: Iterable[Conversation], chats: ChatEncoder, limits: Limits) -> Arrays:
    """Return the arrays of the conversations' requests in order of arrival. Raises ValueError if there are none."""
    sessions = [session for item in conversations if (session := _session(item, chats, limits)).turns]
    if not sessions:
        raise ValueError("the files have no outputs")
    return _arrays(list(arrivals(sessions)))


def _session(conversation: Conversation, chats: ChatEncoder, limits: Limits) -> Session:
    turns = []
    for prompt, output in chats.requests(conversation.messages):
        text = output[:-1]
        if not limits.cut(len(prompt), len(text)):
            turns.append((prompt, output))
        elif not loops(text):
            turns.append((prompt, text))
    return Session(turns, conversation.task, conversation.stage)


def loops(output: Sequence[int]) -> bool:
    """Return whether the end of an output repeats itself."""
    return any(_distinct_share(output[-tail:], n) < share for tail, n, share in LOOPS)


def _distinct_share(tokens: Sequence[int], n: int) -> float:
    """Return the number of different n-grams divided by the number of n-grams."""
    grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


@dataclass(eq=False)
class _Turn:
    """The next request of a session that runs."""

    number: int
    session: Session
    turn: int = 0


def arrivals(sessions: Iterable[Session]) -> Iterator[tuple[int, int, Session]]:
    """Yield (session number, turn, session) for each request. Later stages begin after all earlier ones."""
    generator, order = random.Random(SEED), list(sessions)
    generator.shuffle(order)
    order.sort(key=lambda session: session.stage)
    if all(len(session.turns) == 1 for session in order):
        yield from ((number, 0, session) for number, session in enumerate(order))
        return
    waiting, running = enumerate(order), list[_Turn]()
    while True:
        running += [_Turn(number, session) for number, session in itertools.islice(waiting, AT_ONCE - len(running))]
        if not running:
            return
        chosen = generator.choice(running)
        yield chosen.number, chosen.turn, chosen.session
        chosen.turn += 1
        if chosen.turn == len(chosen.session.turns):
            running.remove(chosen)


def _arrays(requests: Sequence[tuple[int, int, Session]]) -> Arrays:
    tokens: list[np.ndarray] = []
    columns: dict[str, list[int]] = {
        name: [] for name in ("prompt_len", "output_len", "session", "turn", "group", "shared_prefix")
    }
    groups: dict[str, int] = {}
    for number, turn, session in requests:
        prompt, output = session.turns[turn]
        before = list(itertools.chain(*session.turns[turn - 1])) if turn else []
        row = (
            len(prompt),
            len(output),
            number,
            turn,
            groups.setdefault(session.task, len(groups)),
            _shared(before, prompt),
        )
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
        tokens.append(np.array(prompt + output, np.uint32))
    return {"tokens": np.concatenate(tokens)} | {name: np.array(column, np.int32) for name, column in columns.items()}


def _shared(before: Sequence[int], prompt: Sequence[int]) -> int:
    """Return the number of leading tokens that two sequences share."""
    pairs = zip(before, prompt, strict=False)
    return next((index for index, (left, right) in enumerate(pairs) if left != right), min(len(before), len(prompt)))


def digest(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's little-endian bytes, in hexadecimal."""
    return hashlib.sha256(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()).hexdigest()
