"""Naive sampling, one row and one token at a time."""

from __future__ import annotations

import math

import numpy as np


def processed(logits, sampling, prompt, output, eos=()):
    """Processed logits of the token after `output`, a list, before temperature and truncation."""
    result = []
    for token, value in enumerate(logits):
        value = np.float32(value)
        if len(output) < sampling.min_tokens and token in {*eos, *sampling.stop_token_ids}:
            value = np.float32(-np.inf)
        value += np.float32(sampling.logit_bias.get(token, 0))
        count = output.count(token)
        if count or token in prompt:
            penalty = np.float32(sampling.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        value -= np.float32(sampling.frequency_penalty) * np.float32(count)
        if count:
            value -= np.float32(sampling.presence_penalty)
        result.append(float(value))
    return result


def kept(scores, top_k, top_p, min_p):
    """The set of tokens that can be sampled."""
    best = max(scores)
    weights = [math.exp(score - best) for score in scores]
    tokens = {token for token, weight in enumerate(weights) if weight > 0 and weight >= min_p}
    if top_k > 0:
        last = sorted((scores[token] for token in tokens), reverse=True)[: min(top_k, len(tokens))][-1]
        tokens = {token for token in tokens if scores[token] >= last}
        ranked = sorted(tokens, key=lambda token: -scores[token])[:top_k]
    else:
        ranked = sorted(tokens, key=lambda token: -scores[token])
    if top_p < 1:
        total, mass, last = sum(weights[token] for token in ranked), 0.0, best
        for token in ranked:
            if mass >= top_p * total:
                break
            mass += weights[token]
            last = scores[token]
        tokens = {token for token in tokens if scores[token] >= last}
    return tokens


def distribution(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The probabilities with which tokens are sampled."""
    scores = [logit / temperature for logit in logits]
    tokens = kept(scores, top_k, top_p, min_p)
    weights = [math.exp(score - max(scores)) if token in tokens else 0.0 for token, score in enumerate(scores)]
    return np.array(weights) / sum(weights)


def log_softmax(logits):
    best = max(logits)
    total = math.log(sum(math.exp(logit - best) for logit in logits))
    return [logit - best - total for logit in logits]


def stopped(pieces, stops, min_tokens):
    """Return (text, stop string, number of tokens) of an output of `pieces` of text, character by character."""
    text = ""
    for index, piece in enumerate(pieces):
        for character in piece:
            text += character
            found = [stop for stop in stops if text.endswith(stop)]
            if found and index >= min_tokens:
                longest = max(found, key=len)
                return text[: -len(longest)], longest, index + 1
    return text, None, len(pieces)
