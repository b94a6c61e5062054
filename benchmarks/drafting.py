"""How long a draft takes, and how long the index takes to build, by size of the corpus.

    python -m benchmarks.drafting [--tokens 100k,1M]

Text: requests made of phrases that recur at random, so that matches of all lengths occur. Each context is the
end of a request that is not in the corpus; no context is asked for twice.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from drafter_service.cli import TokenCount
from ssd.config import DrafterConfig
from ssd.drafter import POLICIES, new_corpus

REQUEST_TOKENS = 256
PHRASES, PHRASE_TOKENS = 20_000, 24
VOCABULARY = 50_000
CONTEXTS = 3_000


def requests(count: int, seed: int) -> np.ndarray:
    """`count` requests, uint32 [count, REQUEST_TOKENS], cut from phrases that all seeds share."""
    phrases = np.random.default_rng(0).integers(0, VOCABULARY, (PHRASES, PHRASE_TOKENS), np.uint32)
    rng = np.random.default_rng(seed)
    # Popular phrases recur often, most are rare (Zipf's law).
    picked = np.minimum(rng.zipf(1.2, (count, REQUEST_TOKENS // PHRASE_TOKENS + 2)), PHRASES) - 1
    rows = phrases[picked].reshape(count, -1)
    shifts = rng.integers(0, PHRASE_TOKENS, count)
    return np.stack([row[shift : shift + REQUEST_TOKENS] for row, shift in zip(rows, shifts, strict=True)])


def measure(policy_name: str, tokens: int) -> dict[str, object]:
    """Build once, then draft for many fresh contexts."""
    config = DrafterConfig(capacity=tokens, policy=policy_name)  # type: ignore[arg-type]
    policy = POLICIES[policy_name](config)
    corpus = new_corpus(config)
    for request in requests(tokens // REQUEST_TOKENS + 1, seed=1):
        corpus.append(request)
    began = time.perf_counter()
    corpus.refresh()
    build_s = time.perf_counter() - began
    cuts = np.random.default_rng(2).integers(8, REQUEST_TOKENS, CONTEXTS)
    contexts = [request[:cut] for request, cut in zip(requests(CONTEXTS, seed=3), cuts, strict=True)]
    opened = [policy.open(context) for context in contexts]
    times, drafted = [], 0
    for local in opened:
        began = time.perf_counter()
        path = policy.draft(corpus.view, local, 16)
        times.append(time.perf_counter() - began)
        drafted += len(path.tokens)
    p50, p99 = np.percentile(np.array(times) * 1e6, [50, 99])
    return {
        "policy": policy_name,
        "tokens": tokens,
        "build_s": round(build_s, 3),
        "draft_us_p50": round(float(p50), 1),
        "draft_us_p99": round(float(p99), 1),
        "drafted_per_draft": round(drafted / CONTEXTS, 2),
        "bytes_per_token": round((corpus.view.text.nbytes + corpus.view.order.nbytes) / tokens + 4, 1),
    }


def main() -> None:
    """Measure every policy at every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="100k,1M", help="sizes of the corpus, such as 100k,1M,16M")
    sizes = [TokenCount().convert(size, None, None) for size in parser.parse_args().tokens.split(",")]
    results = []
    for size in sizes:
        for policy_name in POLICIES:
            results.append(measure(policy_name, size))
            print(results[-1], flush=True)
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
