"""Small logs for tests."""

import json

import numpy as np


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
