"""Requests of benchmarks: prompts of the demo's workload, or recorded traffic."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.traces import Trace
from engine.commands.demo.workload import make_workload
from engine.commands.prompts import read_texts
from engine.models.config import ModelConfig
from engine.models.shipped import PROMPTS_FILE, SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.sampling.grammar import Grammar
from engine.scheduling.request import Request, SamplingParams
from ssd.errors import UserError

FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["function", "method", "class"]},
        "arguments": {
            "type": "array",
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 16},
                    "type": {"enum": ["int", "str", "bool", "list", "dict"]},
                    "required": {"type": "boolean"},
                },
                "required": ["name", "type", "required"],
                "additionalProperties": False,
            },
        },
        "summary": {"type": "string", "maxLength": 80},
        "returns": {"enum": ["int", "str", "bool", "list", "dict", "None"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 999},
    },
    "required": ["name", "kind", "arguments", "summary", "returns", "lines"],
    "additionalProperties": False,
}
"""JSON schema of a description of the function in a prompt."""
FUNCTION_GRAMMAR = Grammar("json_schema", json.dumps(FUNCTION))


@dataclass(frozen=True)
class Limits:
    """Settings of all requests."""

    prompt_tokens: int
    """Largest number of prompt tokens; longer prompts are truncated at the start."""
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False
    grammar: Grammar | None = None
    """What all outputs must match."""


@dataclass(frozen=True, eq=False)
class Item:
    """One request of a session."""

    request: Request
    session: int
    """Session id; requests of a session run one after the other."""


def demo_items(model: Path | None, count: int, limits: Limits, *, repeats: bool, seed: int = 0) -> list[Item]:
    """Return requests of the demo's workload, encoded with the tokenizer of `model` (None: the shipped model).

    Without `repeats`, all prompts differ. Raises UserError if there are too few prompts.
    """
    prompts = read_texts(SHIPPED_MODEL / PROMPTS_FILE)
    tokenizer = Tokenizer(model or SHIPPED_MODEL)
    if repeats:
        texts = [(item.prompt, item.seed) for item in make_workload(prompts, count, seed)]
    elif count > len(prompts):
        raise UserError(f"{count} requests without repeats need as many prompts; there are {len(prompts)}")
    else:
        texts = [(text, number) for number, text in enumerate(random.Random(seed).sample(prompts, count))]
    return [
        Item(Request(tokenizer.encode(text)[-limits.prompt_tokens :], _sampling(limits, own_seed)), session)
        for session, (text, own_seed) in enumerate(texts)
    ]


def replay_items(trace: Trace, count: int, limits: Limits, model: ModelConfig) -> list[Item]:
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


def is_renumbered(trace: Trace, count: int, limits: Limits, model: ModelConfig) -> bool:
    """Return whether `replay_items` changes the token ids of the trace."""
    return max(int(text.max()) for text in _texts(trace, count, limits)) >= model.vocab_size


def _texts(trace: Trace, count: int, limits: Limits) -> list[np.ndarray]:
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
            f"take fewer requests (--requests) or a shape with a larger vocabulary"
        )
    ends = np.cumsum([len(text) for text in texts])[:-1]
    return np.split(dense.astype(np.uint32), ends)


def _sampling(limits: Limits, seed: int) -> SamplingParams:
    return SamplingParams(
        limits.max_tokens, limits.temperature, seed=seed, ignore_eos=limits.ignore_eos, grammar=limits.grammar
    )
