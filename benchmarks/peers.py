"""Other projects' drafters that need no model. `make peers` installs them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.contestants import Draft, Entry, Running

if TYPE_CHECKING:
    from torch import Tensor

PEERS = {"arctic": "arctic_inference", "pld": "transformers"}
"""The package of each drafter."""

ARCTIC_DEPTH = 64
"""Maximum total length of a match and its draft. 64 is the package's default and better at copying; vLLM's is 24."""
ARCTIC_GRID = {"k": (16, 32), "shape": ("path", "tree"), "factor": (1.0, 4.0), "least_prob": (0.1, 0.05, 0.01)}

PLD_LONGEST = 2
"""Context tokens that are searched for first; the default of transformers."""
NO_LENGTH_LIMIT = 1 << 62


def missing(peer: str) -> str | None:
    """Return the reason why a peer cannot be replayed; None if it can."""
    package = PEERS[peer]
    return None if find_spec(package) else f"{package} is not installed (make peers)"


class Arctic:
    """The suffix trees of Snowflake's ArcticInference, called as its vLLM integration calls them."""

    def __init__(self, k: int, shape: str, factor: float, least_prob: float) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(max_tree_depth=ARCTIC_DEPTH, max_cached_requests=-1)
        self._limits = {
            "max_spec_tokens": k,
            "max_spec_factor": factor,
            "min_token_prob": least_prob,
            "use_tree_spec": shape == "tree",
        }
        self._remembered = 0

    def start(self, sequence: Running) -> None:
        """Build a tree of the prompt."""
        self._cache.start_request(sequence.index, sequence.request.prompt.view(np.int32))

    def commit(self, sequence: Running) -> None:
        """Add tokens to the request's tree and to the shared one."""
        self._cache.add_active_response(sequence.index, sequence.last.view(np.int32))
        self._remembered += len(sequence.last)

    def finish(self, sequence: Running) -> None:
        """Drop the request's tree."""
        self.commit(sequence)
        self._cache.stop_request(sequence.index)

    def refresh(self) -> None:
        """Do nothing; added text is indexed at once."""

    def draft(self, running: Sequence[Running]) -> tuple[list[Draft], float]:
        """Draft for each sequence in a separate call; the probabilities are path probabilities."""
        contexts = [
            (sequence.index, sequence.request.tokens[max(0, sequence.length - ARCTIC_DEPTH) : sequence.length])
            for sequence in running
        ]
        began = time.perf_counter()
        answers = [self._cache.speculate(index, context.view(np.int32), **self._limits) for index, context in contexts]
        seconds = time.perf_counter() - began
        return [Draft(answer.token_ids, answer.parents, answer.probs) for answer in answers], seconds

    def bytes_per_token(self) -> float | None:
        """Return the memory of the shared tree per token, by its own internal estimate."""
        return self._cache._global_tree.estimate_memory() / max(1, self._remembered)


class PromptLookup:
    """Prompt lookup as in transformers: drafts after the first occurrence of the last 2 tokens, or else of the last."""

    def __init__(self, k: int) -> None:
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        self._generator = PromptLookupCandidateGenerator(
            num_output_tokens=k, max_matching_ngram_size=PLD_LONGEST, max_length=NO_LENGTH_LIMIT
        )
        self._tokens: dict[int, Tensor] = {}

    def start(self, sequence: Running) -> None:
        """Keep prompt and output; drafts use only committed tokens."""
        import torch

        self._tokens[sequence.index] = torch.from_numpy(sequence.request.tokens.astype(np.int64))[None]

    def commit(self, sequence: Running) -> None:
        """Do nothing."""

    def finish(self, sequence: Running) -> None:
        """Forget the request."""
        del self._tokens[sequence.index]

    def refresh(self) -> None:
        """Do nothing; there is no index."""

    def draft(self, running: Sequence[Running]) -> tuple[list[Draft], float]:
        """Draft for each sequence in a separate call."""
        contexts = [self._tokens[sequence.index][:, : sequence.length] for sequence in running]
        began = time.perf_counter()
        answers = [self._generator.get_candidates(context)[0] for context in contexts]
        seconds = time.perf_counter() - began
        drafts = []
        for sequence, answer in zip(running, answers, strict=True):
            tokens = answer[0, sequence.length :].tolist()
            drafts.append(Draft(tokens, list(range(-1, len(tokens) - 1)), None))
        return drafts, seconds

    def bytes_per_token(self) -> float | None:
        """Return None, since nothing is remembered."""
        return None


def peer_entries(peer: str, ks: Sequence[int]) -> Iterator[Entry]:
    """Return the settings of a peer; a grid may have its own values of k."""
    if peer == "pld":
        for k in ks:
            yield Entry("pld", f"k={k}", lambda _trace, k=k: PromptLookup(k), k)
        return
    for k, shape, factor, least_prob in itertools.product(*ARCTIC_GRID.values()):
        yield Entry(
            "arctic",
            f"{shape} k={k} factor={factor:g} p={least_prob:g}",
            lambda _trace, settings=(k, shape, factor, least_prob): Arctic(*settings),
            k,
            shape,
        )
