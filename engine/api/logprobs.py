"""Log-probabilities in the forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine.sampling.logprobs import Logprobs
from engine.scheduling.request import Completion

Decode = Callable[[np.ndarray], str]


def completion_logprobs(tokens: np.ndarray, logprobs: Logprobs, decode: Decode, offset: int) -> dict[str, list[Any]]:
    """Of `tokens`, uint32 [N], as `/v1/completions` has them; their text begins `offset` characters into the output."""
    texts = [_text(token, decode) for token in tokens.tolist()]
    starts = offset + np.cumsum([0, *map(len, texts)])[: len(texts)]
    return {
        "tokens": texts,
        "token_logprobs": logprobs.tokens.tolist(),
        "top_logprobs": [
            {_text(token, decode): value for token, value in zip(ids, values, strict=True)}
            for ids, values in zip(logprobs.top_ids.tolist(), logprobs.top.tolist(), strict=True)
        ],
        "text_offset": starts.tolist(),
    }


def prompt_logprobs(prompt: np.ndarray, completion: Completion, decode: Decode) -> dict[str, list[Any]]:
    """The same of a prompt, uint32 [P], whose first token has none."""
    assert completion.prompt_logprobs is not None
    first = _text(int(prompt[0]), decode)
    rest = completion_logprobs(prompt[1:], completion.prompt_logprobs, decode, len(first))
    head = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [value, *rest[name]] for name, value in head.items()}


def chat_logprobs(tokens: np.ndarray, logprobs: Logprobs, decode: Decode) -> dict[str, Any]:
    """Of `tokens`, uint32 [N], as `/v1/chat/completions` has them."""
    rows = zip(
        tokens.tolist(),
        logprobs.tokens.tolist(),
        logprobs.top_ids.tolist(),
        logprobs.top.tolist(),
        strict=True,
    )
    return {
        "content": [
            _entry(token, value, decode)
            | {"top_logprobs": [_entry(*each, decode) for each in zip(ids, values, strict=True)]}
            for token, value, ids, values in rows
        ]
    }


def _entry(token: int, value: float, decode: Decode) -> dict[str, Any]:
    text = _text(token, decode)
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


def _text(token: int, decode: Decode) -> str:
    return decode(np.array([token], np.uint32))
