"""A step's logits to its tokens, each sequence by its own settings."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.executor.batch import Batch
from engine.executor.kernels.sample import sample_tokens
from engine.executor.transfer import on_device
from engine.sampling.logprobs import Logprobs, logprobs_of
from engine.sampling.noise import choose_tokens, greedy_tokens
from engine.sampling.processors import adjusted
from engine.sampling.truncation import Truncation
from engine.scheduling.plan import SequencePlan


class Chosen(NamedTuple):
    """The target's tokens in one step."""

    tokens: np.ndarray
    """uint32 [M]: the one behind each of the rows that `Batch.logit_offsets` cuts."""
    logprobs: dict[int, Logprobs]
    """Of those tokens, by the index of each sequence that asked."""


def choose(batch: Batch, logits: Tensor, entries: SequenceOf[SequencePlan]) -> Chosen:
    """Choose tokens from the logits of a batch, float32 [rows, V], or take recorded ones in their place."""
    if len(logits) > batch.logit_offsets[-1]:
        _score_prompts(batch, logits, entries)
        logits = logits[: batch.logit_offsets[-1]]
    tokens = _on_host(chosen_tokens(batch, logits, entries))
    _replay(batch, tokens, entries)
    return Chosen(tokens, _logprobs(batch, logits, tokens, entries))


def chosen_tokens(batch: Batch, logits: Tensor, entries: SequenceOf[SequencePlan]) -> Tensor:
    """The same tokens where the logits are, int64 [M]. logits: float32 [M, V]."""
    if all(entry.sequence.request.sampling.is_plain_greedy for entry in entries):
        return greedy_tokens(logits)
    return _drawn(batch, adjusted(logits, batch.logit_offsets, entries), entries)


def _replay(batch: Batch, tokens: np.ndarray, entries: SequenceOf[SequencePlan]) -> None:
    """Put recorded tokens in their places, behind every row up to the end of the record."""
    for index, entry in enumerate(entries):
        sequence = entry.sequence
        if sequence.request.recorded is None:
            continue
        to_come = sequence.recorded_rest
        rows = slice(*batch.logit_offsets[index : index + 2].tolist())
        places = batch.positions[batch.logit_rows[rows]] + 1 - len(sequence)
        is_recorded = places < len(to_come)
        tokens[rows][is_recorded] = to_come[places[is_recorded]]


def _on_host(tokens: Tensor) -> np.ndarray:
    """Tokens as the host has them, uint32, once the device is done with them."""
    return tokens.to("cpu").numpy().astype(np.uint32)


def _drawn(batch: Batch, logits: Tensor, entries: SequenceOf[SequencePlan]) -> Tensor:
    samplings = [entry.sequence.request.sampling for entry in entries]
    counts = np.diff(batch.logit_offsets)
    truncation = None
    if any(sampling.truncates for sampling in samplings):
        truncation = Truncation(
            top_k=np.repeat([sampling.top_k for sampling in samplings], counts),
            top_p=np.repeat([sampling.top_p for sampling in samplings], counts),
            min_p=np.repeat([sampling.min_p for sampling in samplings], counts),
        )
    settings = (
        np.repeat(np.array([sampling.temperature for sampling in samplings], np.float64), counts),
        np.repeat(np.array([sampling.seed for sampling in samplings], np.int64), counts),
        batch.positions[batch.logit_rows[: len(logits)]] + 1,
    )
    if not logits.is_cuda:
        return choose_tokens(logits, *settings, truncation)
    # As the pipelined loop does: another implementation's logarithms may differ in the last bit.
    limits = None if truncation is None else truncation.on(logits)
    temperatures, seeds, positions = (on_device(array, logits.device) for array in settings)
    return sample_tokens(logits, temperatures, seeds, positions, limits)


def _logprobs(
    batch: Batch, logits: Tensor, tokens: np.ndarray, entries: SequenceOf[SequencePlan]
) -> dict[int, Logprobs]:
    asked = {
        index: sampling.logprobs
        for index, entry in enumerate(entries)
        if (sampling := entry.sequence.request.sampling).logprobs is not None
    }
    return _in_parts(logits, tokens, batch.logit_offsets, asked)


def _score_prompts(batch: Batch, logits: Tensor, entries: SequenceOf[SequencePlan]) -> None:
    """Keep what the model thought of the prompts' tokens that follow the scored rows."""
    first = batch.scored_offsets[0]
    following = [entry.sequence.tokens[entry.scored.start + 1 : entry.scored.stop + 1] for entry in entries]
    asked = {
        index: entry.sequence.request.sampling.prompt_logprobs or 0
        for index, entry in enumerate(entries)
        if len(entry.scored)
    }
    parts = _in_parts(logits[first:], np.concatenate(following), batch.scored_offsets - first, asked)
    for index, part in parts.items():
        entries[index].sequence.prompt_logprobs.append(part)


def _in_parts(logits: Tensor, tokens: np.ndarray, offsets: np.ndarray, asked: dict[int, int]) -> dict[int, Logprobs]:
    """Log-probabilities of the rows of some sequences, with as many alternatives as each of them asked for."""
    if not asked:
        return {}
    rows = np.concatenate([np.arange(offsets[index], offsets[index + 1]) for index in asked])
    together = logprobs_of(logits[rows], tokens[rows], max(asked.values()))
    ends = np.cumsum([offsets[index + 1] - offsets[index] for index in asked])
    return {
        index: together.part(end - (offsets[index + 1] - offsets[index]), end, count)
        for (index, count), end in zip(asked.items(), ends, strict=True)
    }
