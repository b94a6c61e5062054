"""Naive rejection sampling: one draft and one candidate at a time, on lists."""

from __future__ import annotations

import math


def normalized(weights):
    total = sum(weights)
    return [weight / total for weight in weights] if total else weights


def residual(p, q):
    left = [max(mine - theirs, 0.0) for mine, theirs in zip(p, q, strict=True)]
    return normalized(left) if sum(left) else p


def sample(probabilities, noise):
    def score(token):
        return (math.log(probabilities[token]) if probabilities[token] else -math.inf) + noise[token]

    return max(range(len(probabilities)), key=score)


def verify_tree(draft, parents, sampled, p, q, uniform, noise):
    """Return the indices of accepted nodes, and the target's own token. Row 0 of p and q is after the context.

    sampled: whether each node was sampled; others are deterministic candidates. uniform, noise: functions of depth
    and rank, and of depth.
    """
    path, at = [], -1
    while True:
        target, left = p[at + 1], q[at + 1]
        for rank, child in enumerate(child for child, parent in enumerate(parents) if parent == at):
            token = draft[child]
            drafter = left if sampled[child] else [float(other == token) for other in range(len(left))]
            if uniform(len(path), rank) * drafter[token] < target[token]:
                path.append(child)
                at = child
                break
            target = residual(target, drafter)
            if sampled[child]:
                left = normalized([0.0 if other == token else weight for other, weight in enumerate(left)])
        else:
            return path, sample(target, noise(len(path)))
