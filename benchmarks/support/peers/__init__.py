"""Other projects' drafters that need no model.

Arctic and transformers' prompt lookup are the packages themselves; `make peers` installs them. The others are
re-implementations of published algorithms with the originals' defaults.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from benchmarks.support.drafters import Candidate
from benchmarks.support.peers.arctic import Arctic
from benchmarks.support.peers.automaton import SuffixAutomata
from benchmarks.support.peers.one_by_one import OneByOne
from benchmarks.support.peers.prompt_lookup import PromptLookup, VllmNgram
from benchmarks.support.peers.tries import RestLike, SglangNgram

PACKAGES = {"arctic": "arctic_inference", "pld": "transformers"}
"""Packages that peers need."""
WITH_K: dict[str, tuple[type[OneByOne], str]] = {
    "pld": (PromptLookup, "path"),
    "vllm-ngram": (VllmNgram, "path"),
    "sglang-ngram": (SglangNgram, "tree"),
    "rest-like": (RestLike, "tree"),
    "suffix-automata": (SuffixAutomata, "path"),
}
"""Peers whose only setting is the size of drafts, and the shape of their drafts."""
PEERS = ("arctic", *WITH_K)

ARCTIC_GRID = {"k": (16, 32), "shape": ("path", "tree"), "factor": (1.0, 4.0), "least_prob": (0.1, 0.05, 0.01)}


def missing(peer: str) -> str | None:
    """Return the reason why a peer cannot be replayed; None if it can."""
    package = PACKAGES.get(peer)
    return None if package is None or find_spec(package) else f"{package} is not installed (make peers)"


def peer_candidates(peer: str, ks: Sequence[int]) -> Iterator[Candidate]:
    """Return the settings of a peer; a grid may have its own values of k."""
    if peer in WITH_K:
        build, shape = WITH_K[peer]
        for k in ks:
            yield Candidate(peer, f"k={k}", lambda _traffic: build(), k, shape)
        return
    for k, shape, factor, least_prob in itertools.product(*ARCTIC_GRID.values()):
        yield Candidate(
            "arctic",
            f"{shape} k={k} factor={factor:g} p={least_prob:g}",
            lambda _traffic, settings=(factor, least_prob), is_tree=shape == "tree": Arctic(*settings, is_tree=is_tree),
            k,
            shape,
        )
