"""Speculative sampling the slow and obvious way: one draft, one candidate at a time, on lists."""

from __future__ import annotations

import math


def normalised(weights):
    total = sum(weights)
    return [weight / total for weight in weights] if total else weights


def residual(p, q):
    left = [max(mine - theirs, 0.0) for mine, theirs in zip(p, q, strict=True)]
    return normalised(left) if sum(left) else p


def drawn(odds, noise):
    return max(range(len(odds)), key=lambda token: (math.log(odds[token]) if odds[token] else -math.inf) + noise[token])


def verify_path(draft, p, q, chance, noise):
    """Accepted tokens and the target's own. chance, noise: functions of depth and rank, and of depth."""
    for depth, token in enumerate(draft):
        if not chance(depth, 0) < p[depth][token] / q[depth][token]:
            return draft[:depth], drawn(residual(p[depth], q[depth]), noise(depth))
    return draft, drawn(p[len(draft)], noise(len(draft)))


def verify_tree(draft, parents, p, q, chance, noise):
    """Indices of accepted nodes and the target's own token; row 0 of p and q is behind the context."""
    path, at = [], -1
    while True:
        target, drafter = p[at + 1], q[at + 1]
        for rank, child in enumerate(child for child, parent in enumerate(parents) if parent == at):
            token = draft[child]
            if chance(len(path), rank) * drafter[token] < target[token]:
                path.append(child)
                at = child
                break
            target = residual(target, drafter)
            drafter = normalised([0.0 if other == token else odds for other, odds in enumerate(drafter)])
        else:
            return path, drawn(target, noise(len(path)))
