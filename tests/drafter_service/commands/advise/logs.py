"""Small logs for tests."""

import json

import numpy as np

from drafter_service.commands.advise.traffic import Traffic


def traffic_of(requests, *, sessions=None, users=None, began=None, ended=None, groups=None, versions=None):
    """Return traffic of pairs of prompt and output, lists of token ids."""
    count = len(requests)
    tokens = [np.array([*prompt, *output], np.uint32) for prompt, output in requests]
    return Traffic(
        tokens=np.concatenate(tokens) if tokens else np.empty(0, np.uint32),
        starts=np.cumsum([0, *map(len, tokens)]),
        prompt_lengths=np.array([len(prompt) for prompt, _ in requests], np.int64),
        began_s=np.full(count, np.nan) if began is None else np.array(began, float),
        ended_s=np.full(count, np.nan) if ended is None else np.array(ended, float),
        users=np.full(count, -1) if users is None else np.array(users),
        sessions=np.full(count, -1) if sessions is None else np.array(sessions),
        groups=np.full(count, -1) if groups is None else np.array(groups),
        versions=np.full(count, -1) if versions is None else np.array(versions),
    )


def repeated_requests(count=40, length=60, *, seed=0):
    """Return requests of two kinds, each of which always has the same output."""
    rng = np.random.default_rng(seed)
    kinds = [(rng.integers(0, 1000, 20).tolist(), rng.integers(0, 1000, length).tolist()) for _ in range(2)]
    return [kinds[number % 2] for number in range(count)]


def random_requests(count=40, length=60, *, seed=0):
    """Return requests that have nothing in common."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, 50_000, 20).tolist(), rng.integers(0, 50_000, length).tolist()) for _ in range(count)]


def write_log(path, requests, **columns):
    """Write requests as JSON lines of token ids; columns: further fields, a value per request."""
    lines = []
    for number, (prompt, output) in enumerate(requests):
        record = {"request_id": f"r{number}", "prompt_token_ids": prompt, "choices": [{"token_ids": output}]}
        lines.append(json.dumps(record | {name: values[number] for name, values in columns.items()}))
    path.write_text("\n".join(lines) + "\n")
    return path
