"""Other projects' drafters that need no model.

Arctic and transformers' prompt lookup are the packages themselves; `make peers` installs them. The others are
re-implementations of published algorithms with the originals' defaults; `das` and `specrl` use Arctic's suffix trees.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from benchmarks.support.drafters import Candidate
from benchmarks.support.peers.arctic import Arctic
from benchmarks.support.peers.automaton import SuffixAutomata
from benchmarks.support.peers.prompt_lookup import PromptLookup, VllmNgram
from benchmarks.support.peers.rollouts import Das, PreviousAnswer, SpecRl
from benchmarks.support.peers.text_drafter import TextDrafter
from benchmarks.support.peers.tries import RestLike, SglangNgram
from drafter_service.commands.advise.arctic import HIGH_COST_SETTINGS, LOW_COST_SETTINGS

PACKAGES = {**dict.fromkeys(("arctic", "das", "specrl"), "arctic_inference"), "pld": "transformers"}
"""Packages that peers need."""
WITH_K: dict[str, tuple[type[TextDrafter], str]] = {
    "pld": (PromptLookup, "path"),
    "vllm-ngram": (VllmNgram, "path"),
    "sglang-ngram": (SglangNgram, "tree"),
    "rest-like": (RestLike, "tree"),
    "suffix-automata": (SuffixAutomata, "path"),
}
"""Peers whose only setting is the size of drafts, and the shape of their drafts."""
PEERS = ("arctic", *WITH_K)
ROLLOUT_PEERS = ("das", "specrl", "previous-answer")
"""Peers for rollouts of reinforcement learning, which use groups and versions."""

ARCTIC_GRID = {"k": (16, 32), "shape": ("path", "tree"), "factor": (1.0, 4.0), "least_prob": (0.1, 0.05, 0.01)}
DAS_GRID = {"shape": ("path", "tree"), "window": (1, 2, 4, None), "settings": (LOW_COST_SETTINGS, HIGH_COST_SETTINGS)}
REALIGNMENTS = (2, 3, 5)
"""Tokens by which `previous-answer` finds its place again."""


def missing(peer: str) -> str | None:
    """Return the reason why a peer cannot be replayed; None if it can."""
    package = PACKAGES.get(peer)
    return None if package is None or find_spec(package) else f"{package} is not installed (make peers)"


def peer_candidates(peer: str, ks: Sequence[int]) -> Iterator[Candidate]:
    """Return the settings of a peer; a grid may have its own values of k."""
    if peer in WITH_K:
        build, shape = WITH_K[peer]
        for k in ks:
            yield Candidate(peer, f"k={k}", lambda _: build(), k, shape)
        return
    if peer in ROLLOUT_PEERS:
        yield from _rollout_candidates(peer, ks)
        return
    for k, shape, factor, least_prob in itertools.product(*ARCTIC_GRID.values()):
        yield Candidate(
            "arctic",
            f"{shape} k={k} factor={factor:g} p={least_prob:g}",
            lambda _, settings=(factor, least_prob), is_tree=shape == "tree": Arctic(*settings, is_tree=is_tree),
            k,
            shape,
        )


def _rollout_candidates(peer: str, ks: Sequence[int]) -> Iterator[Candidate]:
    if peer == "specrl":
        yield Candidate(peer, "", lambda _: SpecRl(), SpecRl.LONGEST_DRAFT)
        return
    if peer == "previous-answer":
        for k, n in itertools.product(ks, REALIGNMENTS):
            yield Candidate(peer, f"k={k} n={n}", lambda _, n=n: PreviousAnswer(n), k)
        return
    for k, shape, window, (factor, least_prob) in itertools.product(ks, *DAS_GRID.values()):
        yield Candidate(
            peer,
            f"{shape} k={k} window={window or 'all'} factor={factor:g} p={least_prob:g}",
            lambda _, settings=(window, factor, least_prob), is_tree=shape == "tree": Das(*settings, is_tree=is_tree),
            k,
            shape,
        )
