"""Encode conversations as token ids with published vocabularies and their chat templates."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.traces.formats import ASSISTANT, RENDERED, Message

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


class Encoder(Protocol):
    """Byte-pair encoding of text; `tiktoken.Encoding` is one."""

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the tokens of a text, in which the names of special tokens are ordinary text."""
        ...

    def encode(self, text: str, *, allowed_special: str) -> list[int]:
        """Return the tokens of a text with special tokens (`allowed_special` is "all")."""
        ...


def load_encoder(name: str, ranks: Path) -> Encoder:
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
    encoder: Encoder
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
