"""Log-probabilities in the formats of the two endpoints, and the names of tokens in them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import numpy as np

from engine.models.tokenizer import Tokenizer
from engine.sampling.logprobs import Logprobs


class TokenNames:
    """Names of tokens: their text, or another notation for tokens that are not text by themselves."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        """as_ids: name all tokens by their ids (vLLM's `return_tokens_as_token_ids`)."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token: int) -> str:
        r"""Return the text of a token, `bytes:\xf0\x9f` for a part of a character, or `token_id:7` without a text."""
        data = self._tokenizer.token_bytes(token)
        if self._as_ids or not data:
            return id_name(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def output_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to the text of an output: none for a special token."""
        return b"" if token in self._tokenizer.special_ids else self._tokenizer.token_bytes(token)


def id_name(token: int) -> str:
    """Return vLLM's name of a token that is not given as text."""
    return f"token_id:{token}"


def chat_logprobs(tokens: np.ndarray, logprobs: Logprobs, names: TokenNames) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice. tokens: uint32 [N]."""

    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": names.name(token), "logprob": value, "bytes": list(names.output_bytes(token))}

    return {
        "content": [
            entry(token, value) | {"top_logprobs": [entry(*each) for each in top]}
            for token, value, top in _rows(tokens, logprobs)
        ]
    }


def completion_logprobs(
    tokens: np.ndarray, logprobs: Logprobs, names: TokenNames, offsets: list[int]
) -> dict[str, list[Any] | None]:
    """Return the `logprobs` of a completion's choice; `top_logprobs` is None without alternatives.

    tokens: uint32 [N]. offsets: index in the choice's text at which each token begins.
    """
    rows = list(_rows(tokens, logprobs))
    has_top = logprobs.top_ids.shape[1] > 0
    return {
        "tokens": [names.name(token) for token, _, _ in rows],
        "token_logprobs": [value for _, value, _ in rows],
        "top_logprobs": [_by_name(token, value, top, names) for token, value, top in rows] if has_top else None,
        "text_offset": list(offsets),
    }


def _rows(tokens: np.ndarray, logprobs: Logprobs) -> Iterable[tuple[int, float, list[tuple[int, float]]]]:
    """Yield each token, its log-probability, and those of the most likely tokens."""
    top = (list(zip(*each, strict=True)) for each in zip(logprobs.top_ids.tolist(), logprobs.top.tolist(), strict=True))
    return zip(tokens.tolist(), logprobs.tokens.tolist(), top, strict=True)


def _by_name(token: int, value: float, top: list[tuple[int, float]], names: TokenNames) -> dict[str, float]:
    """Return log-probabilities by name: of the most likely tokens, and of `token`, last if it is not one of them.

    If several tokens have the same name, all but one are named by their ids; `token` keeps its name.
    """
    own = names.name(token)
    entries: dict[str, float] = {}
    for each, its_value in top:
        name = own if each == token else names.name(each)
        is_taken = name in entries or (name == own and each != token)
        entries[id_name(each) if is_taken else name] = its_value
    return entries | {own: value}


class TextOffsets:
    """Indices in a growing text at which tokens begin: the number of characters that are complete before them."""

    def __init__(self, start: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = start

    def advance(self, pieces: Iterable[bytes]) -> list[int]:
        """Append the bytes of tokens and return their indices."""
        sizes = [len(self._decoder.decode(piece)) for piece in pieces]
        *starts, self._at = accumulate(sizes, initial=self._at)
        return starts


def prompt_offsets(text: str, pieces: list[bytes]) -> list[int]:
    """Return the indices in the text of a prompt at which its tokens begin. pieces: bytes of the tokens.

    The tokens may have more text than the prompt: special tokens, or a space that the tokenizer adds at the beginning.
    """
    starts = TextOffsets().advance(pieces)
    added = max(0, b"".join(pieces).decode(errors="replace").find(text))
    return [min(max(0, start - added), len(text)) for start in starts]
