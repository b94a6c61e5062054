"""Responses to requests as JSON: choices, usage and log-probabilities, in the formats of the two endpoints."""

from __future__ import annotations

import codecs
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np

from engine.api.outputs import Delta
from engine.api.schemas import SamplingFields
from engine.api.service import Service
from engine.models.tokenizer import Tokenizer
from engine.sampling.logprobs import Logprobs
from engine.scheduling.draft_usage import draft_usage
from engine.scheduling.request import Completion, Request

B = TypeVar("B", bound=SamplingFields)


class ResponseFormat(ABC, Generic[B]):
    """Reads one request to an endpoint, and builds the JSON of its response, of which it keeps the state."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, service: Service, body: B) -> None:
        self.requests: Sequence[Request] = ()
        """Those of `make_requests`, set when they begin to run."""
        self.completions: dict[int, Completion] = {}
        """Completions of the outputs that have ended, by request index."""
        self.names = TokenNames(service.served.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._service = service
        self._body = body
        self._header = {
            "id": f"{self.id_prefix}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": body.model,
        }

    @abstractmethod
    async def make_requests(self) -> list[Request]:
        """Return `n` requests per prompt, in the order of the prompts. Raises ApiError and UserError."""

    @abstractmethod
    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks at the beginning of a stream."""

    @abstractmethod
    def choice_of(self, delta: Delta, *, is_chunk: bool) -> dict[str, Any]:
        """Return the choice of a stream chunk or, for a delta that is a complete output, of a complete response."""

    def document(self, outputs: Sequence[Delta]) -> dict[str, Any]:
        """Return a complete response."""
        self.completions = {output.index: output.completion for output in outputs if output.completion is not None}
        choices = [self.choice_of(output, is_chunk=False) for output in outputs]
        return self._header | {"object": self.object_name, "choices": choices, "usage": self._usage()}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the chunks for a delta: one, or none if nothing in it is visible."""
        if delta.completion is not None:
            self.completions[delta.index] = delta.completion
        choice = self.choice_of(delta, is_chunk=True)
        has_tokens = delta.logprobs is not None or self._body.return_token_ids
        # Text that may belong to a stop string or a tool call is sent later.
        has_text = bool(delta.pieces) and (choice.get("delta") != {} or self._body.return_drafted)
        return [self.chunk([choice])] if has_text or has_tokens or delta.completion is not None else []

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks at the end of a stream."""
        if self._body.stream_options is None or not self._body.stream_options.include_usage:
            return []
        return [self.chunk([]) | {"usage": self._usage()}]

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return one chunk of a stream."""
        return self._header | {"object": self.chunk_name, "choices": choices}

    def choice(self, index: int, content: dict[str, Any], completion: Completion | None) -> dict[str, Any]:
        """Return a choice without log-probabilities; `completion`: None until the output has ended."""
        reason, stop_reason = (None, None) if completion is None else (completion.finish_reason, completion.stop_reason)
        return {"index": index, **content, "logprobs": None, "finish_reason": reason, "stop_reason": stop_reason}

    def prompt_index(self, index: int) -> int:
        """Return the index of the prompt of an output."""
        return index // self._body.n

    def prompt_fields(self, index: int) -> dict[str, Any]:
        """Return the token ids of the prompt of an output, if they were requested."""
        return {"prompt_token_ids": self.requests[index].prompt.tolist()} if self._body.return_token_ids else {}

    def token_fields(self, delta: Delta) -> dict[str, Any]:
        """Return the fields that were requested about the tokens of a delta: their ids, and which text is drafted."""
        ids = {"token_ids": delta.tokens.tolist()} if self._body.return_token_ids else {}
        return ids | ({"pieces": [list(piece) for piece in delta.pieces]} if self._body.return_drafted else {})

    def _usage(self) -> dict[str, Any]:
        return usage([len(request.prompt) for request in self.requests[:: self._body.n]], self.completions)


def usage(prompts: Sequence[int], completions: Mapping[int, Completion]) -> dict[str, Any]:
    """Return OpenAI's usage object, including its fields for predicted outputs, and our fields.

    prompts: number of tokens of each prompt. completions: by index; the outputs of a prompt are consecutive, and all
    prompts have the same number of outputs.
    """
    outputs = completions.values()
    prompt_tokens = sum(prompts)
    completion_tokens = sum(len(completion.tokens) for completion in outputs)
    drafted = sum(completion.predicted.drafted for completion in outputs)
    accepted = sum(completion.predicted.accepted for completion in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": _cached_tokens(len(completions) // len(prompts), completions)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "draft": draft_usage(outputs),
        "repeated_tokens": sum(len(completion.tokens) for completion in outputs if completion.is_repeat),
    }


def _cached_tokens(n: int, completions: Mapping[int, Completion]) -> int:
    """Return the number of prompt tokens cached before the HTTP request: the minimum over the `n` outputs of a prompt.

    Later outputs of a prompt find the pages of the first one.
    """
    return sum(
        min(completions[first + index].cached_tokens for index in range(n)) for first in range(0, len(completions), n)
    )


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
