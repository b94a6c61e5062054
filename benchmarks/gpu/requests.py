"""Requests of recorded traffic, in the vocabulary of a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.models.config import ModelConfig
from engine.scheduling.request import Request, SamplingParams
from ssd.errors import UserError
from ssd.replay import Recording


@dataclass(frozen=True)
class Limits:
    """Settings of all requests."""

    prompt_tokens: int
    """Largest number of prompt tokens; longer prompts are truncated at the start."""
    max_tokens: int


@dataclass(frozen=True, eq=False)
class Item:
    """One request of a session."""

    request: Request
    session: int
    """Session id; requests of a session run one after the other."""


def replay_items(trace: Recording, count: int, limits: Limits, model: ModelConfig) -> list[Item]:
    """Return the first requests of a trace. Raises UserError if they have more distinct tokens than the model."""
    requests = trace.requests[:count]
    texts = _texts(trace, count, limits)
    kept = [min(len(request.output), limits.max_tokens) for request in requests]
    return [
        Item(
            Request(text[:-length], SamplingParams(max_tokens=length, ignore_eos=True), recorded=text[-length:]),
            request.session,
        )
        for text, length, request in zip(_dense(texts, model.vocab_size), kept, requests, strict=True)
    ]


def is_renumbered(trace: Recording, count: int, limits: Limits, model: ModelConfig) -> bool:
    """Return whether `replay_items` changes the token ids of the trace."""
    return max(int(text.max()) for text in _texts(trace, count, limits)) >= model.vocab_size


def _texts(trace: Recording, count: int, limits: Limits) -> list[np.ndarray]:
    return [
        np.concatenate((request.prompt[-limits.prompt_tokens :], request.output[: limits.max_tokens]))
        for request in trace.requests[:count]
    ]


def _dense(texts: list[np.ndarray], vocab_size: int) -> list[np.ndarray]:
    """Return the texts with ids below `vocab_size`, renumbered if they have larger ones."""
    flat = np.concatenate(texts)
    if int(flat.max()) < vocab_size:
        return texts
    kinds, dense = np.unique(flat, return_inverse=True)
    if len(kinds) > vocab_size:
        raise UserError(
            f"the trace's requests have {len(kinds):,} distinct tokens, the model has {vocab_size:,}; "
            "take a shape with a larger vocabulary"
        )
    ends = np.cumsum([len(text) for text in texts])[:-1]
    return np.split(dense.astype(np.uint32), ends)
