"""Turn conversations into the arrays of a trace: encode them, leave out loops, and put their requests in order.

Conversations are encoded with published vocabularies and their chat templates. Sessions are shuffled with
`random.Random(0)`. Conversations of several turns interleave: eight run at once, and a random one of them makes the
next request.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.traces.formats import ASSISTANT, RENDERED, Conversation, Message

AT_ONCE = 8
SEED = 0
LOOPS = ((1024, 8, 0.5), (256, 4, 0.25))
"""An output that was cut off loops if, of the n-grams in its last tokens, too few are different: (tokens, n, share)."""

Arrays = dict[str, np.ndarray]
"""The arrays of a trace by name: `tokens`, uint32, and for each request int32 `prompt_len`, `output_len`, `session`,
`turn`, `group` (task) and `shared_prefix` (leading tokens equal to the session's previous prompt and output)."""


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")
_CL100K_WORDS = "|".join((_ENDINGS, r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", *_SPACES))
_O200K_WORDS = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _ENDINGS + "?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _ENDINGS + "?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        *_SPACES,
    )
)


@dataclass(frozen=True)
class Vocabulary:
    """The rules of a vocabulary and of its chats; its ranks are downloaded.

    A message is written as `start`, its role, `middle`, `separator`, its text, `end`.
    """

    words: str
    """Regular expression that splits text into words before byte-pair encoding."""
    start: int
    middle: int
    end: int
    separator: str = ""
    head: tuple[int, ...] = ()
    """Token ids before the first message."""
    special: dict[str, int] = field(default_factory=dict)
    """Special tokens that the text of a rendered prompt may name."""


_LLAMA3_SPECIAL = {
    "<|begin_of_text|>": 128_000,
    "<|start_header_id|>": 128_006,
    "<|end_header_id|>": 128_007,
    "<|eot_id|>": 128_009,
}
VOCABULARIES = {
    "cl100k": Vocabulary(_CL100K_WORDS, start=100_264, middle=100_266, end=100_265),
    "o200k": Vocabulary(_O200K_WORDS, start=200_264, middle=200_266, end=200_265),
    "llama3": Vocabulary(
        _CL100K_WORDS,
        start=128_006,
        middle=128_007,
        end=128_009,
        separator="\n\n",
        head=(128_000,),
        special=_LLAMA3_SPECIAL,
    ),
}
"""ChatML with the special tokens of tiktoken's chat models, and Llama 3's chat format."""


def load_encoder(name: str, ranks: Path) -> Any:
    """Return the encoder of a vocabulary. ranks: file of base64 tokens and their ranks, as tiktoken publishes them.

    Raises ModuleNotFoundError without tiktoken.
    """
    import tiktoken

    vocabulary = VOCABULARIES[name]
    lines = (line.split() for line in ranks.read_bytes().splitlines() if line)
    return tiktoken.Encoding(
        name,
        pat_str=vocabulary.words,
        mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in lines},
        special_tokens=vocabulary.special,
    )


@dataclass(frozen=True)
class ChatEncoder:
    """Encodes the messages of chats, each text once."""

    vocabulary: Vocabulary
    encoder: Any
    """`tiktoken.Encoding`, or another with its methods `encode_ordinary` and `encode`."""
    _known: dict[str, list[int]] = field(default_factory=dict)

    def requests(self, messages: Sequence[Message]) -> list[tuple[list[int], list[int]]]:
        """Return the prompt and the output of each message of the assistant that is not empty."""
        rules = self.vocabulary
        so_far, requests = [*rules.head], []
        for role, text in messages:
            if role == RENDERED:
                so_far = self.encoder.encode(text, allowed_special="all")
                continue
            header = [rules.start, *self._ordinary(role), rules.middle]
            if role != ASSISTANT:
                so_far += [*header, *self._ordinary(rules.separator + text), rules.end]
                continue
            opens = messages[0].role != RENDERED or bool(requests)
            prompt = [*so_far, *header, *self._ordinary(rules.separator)] if opens else so_far
            output = [*self._ordinary(text), rules.end]
            requests.append((prompt, output))
            so_far = prompt + output
        return requests

    def _ordinary(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self.encoder.encode_ordinary(text)
        return self._known[text]


class Limits(NamedTuple):
    """Lengths from which an output counts as cut off; it then has no token that ends it.

    They are a few tokens below the limit of the original run, whose tokens are not known exactly.
    """

    output_tokens: float = math.inf
    total_tokens: float = math.inf
    """Length of prompt and output."""


class Session(NamedTuple):
    """The requests of a conversation as (prompt, output), in order."""

    turns: list[tuple[list[int], list[int]]]
    task: str
    stage: int


def convert(conversations: Iterable[Conversation], chats: ChatEncoder, limits: Limits) -> Arrays:
    """Return the arrays of the conversations' requests in order of arrival. Raises ValueError if there are none."""
    sessions = []
    for conversation in conversations:
        turns = []
        for prompt, output in chats.requests(conversation.messages):
            text = output[:-1]
            if len(text) < limits.output_tokens and len(prompt) + len(text) < limits.total_tokens:
                turns.append((prompt, output))
            elif not loops(text):
                turns.append((prompt, text))
        if turns:
            sessions.append(Session(turns, conversation.task, conversation.stage))
    if not sessions:
        raise ValueError("the files have no outputs")
    return _arrays(arrivals(sessions))


def loops(output: Sequence[int]) -> bool:
    """Return whether the end of an output repeats itself."""
    for tail, n, share in LOOPS:
        tokens = output[-tail:]
        grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
        if len(set(grams)) < share * len(grams):
            return True
    return False


def arrivals(sessions: Iterable[Session]) -> Iterator[tuple[int, int, Session]]:
    """Yield (session number, turn, session) for each request. Later stages begin after all earlier ones."""
    generator, order = random.Random(SEED), list(sessions)
    generator.shuffle(order)
    order.sort(key=lambda session: session.stage)
    if all(len(session.turns) == 1 for session in order):
        yield from ((number, 0, session) for number, session in enumerate(order))
        return
    waiting = ([(number, turn, session) for turn in range(len(session.turns))] for number, session in enumerate(order))
    running: list[list[tuple[int, int, Session]]] = []
    while True:
        running += itertools.islice(waiting, AT_ONCE - len(running))
        if not running:
            return
        chosen = generator.choice(running)
        yield chosen.pop(0)
        if not chosen:
            running.remove(chosen)


def _arrays(requests: Iterable[tuple[int, int, Session]]) -> Arrays:
    tokens, rows = list[np.ndarray](), list[tuple[int, ...]]()
    groups: dict[str, int] = {}
    for number, turn, session in requests:
        prompt, output = session.turns[turn]
        before = list(itertools.chain(*session.turns[turn - 1])) if turn else []
        group = groups.setdefault(session.task, len(groups))
        rows.append((len(prompt), len(output), number, turn, group, _shared(before, prompt)))
        tokens.append(np.array(prompt + output, np.uint32))
    names = ("prompt_len", "output_len", "session", "turn", "group", "shared_prefix")
    columns = np.ascontiguousarray(np.array(rows, np.int32).T)
    return {"tokens": np.concatenate(tokens), **dict(zip(names, columns, strict=True))}


def _shared(before: Sequence[int], prompt: Sequence[int]) -> int:
    """Return the number of leading tokens that two sequences share."""
    pairs = zip(before, prompt, strict=False)
    return next((index for index, (left, right) in enumerate(pairs) if left != right), min(len(before), len(prompt)))


def digest(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's little-endian bytes, in hexadecimal."""
    return hashlib.sha256(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()).hexdigest()
