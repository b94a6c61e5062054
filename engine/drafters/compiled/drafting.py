"""Run a compiled network for the sequences of a step, on the pages of a drafter's layers."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.plain import PlainAttention
from engine.drafters.compiled.layers import HIDDEN, Network, NetworkCache
from engine.drafters.compiled.paths import PathSettings, PathTokens, draft_paths, run_rows
from engine.drafters.draft_forward import DraftSpan
from engine.drafters.drafts import Drafts
from engine.drafters.pricing import DepthPrice
from engine.models.heads.head import HeadOutput
from engine.scheduling.sequence import Sequence
from ssd.acceptance import AcceptanceTable
from ssd.types import ROOT, DraftBatch, offsets_of


class DraftedPaths(NamedTuple):
    """Paths of a step."""

    drafts: Drafts
    run: np.ndarray
    """int64 [B]: number of tokens of each path whose keys and values are stored."""
    position_s: float | None
    """Mean duration of a draft position, in seconds; None if there was only one."""
    is_stopped: bool
    """Whether a further position was not worthwhile."""


class CompiledDrafting:
    """A compiled network with its cache."""

    def __init__(self, network: Network, cache: NetworkCache) -> None:
        self.network = network
        self._cache = cache

    def run(self, spans: SequenceOf[DraftSpan], tokens: np.ndarray, stored: Tensor) -> HeadOutput:
        """Run consecutive tokens of each sequence, N in all; return the output after each of them.

        tokens: int64 [N]. stored: float32 [cache slots, S], the state of the position in each slot.
        """
        pages, starts = _page_tables([span.pages for span in spans])
        lengths = np.array([span.length for span in spans])
        owner = np.arange(len(spans)).repeat(lengths)
        first = np.array([span.start for span in spans]) - np.cumsum(lengths) + lengths
        positions = first[owner] + np.arange(len(tokens))
        hidden = np.empty((len(tokens), int(self.network.sizes[HIDDEN])), np.float32)
        states = np.empty((len(tokens), stored.shape[1]), np.float32)
        run_rows(
            self.network, self._cache, tokens, positions, owner, pages, starts, stored.numpy(), hidden, states
        )  # fmt: skip
        return HeadOutput(torch.from_numpy(hidden), torch.from_numpy(states))

    def draft(
        self,
        sequences: SequenceOf[Sequence],
        rooms: np.ndarray,
        output: HeadOutput,
        table: AcceptanceTable,
        price: DepthPrice,
        depth: int,
        source: int,
    ) -> DraftedPaths:
        """Draft paths of at most `depth` tokens after the last committed tokens, whose output is given.

        rooms: int64 [B], largest number of draft tokens of each sequence.
        """
        count = len(sequences)
        pages, starts = _page_tables([sequence.pages for sequence in sequences])
        samplings = [sequence.request.sampling for sequence in sequences]
        settings = PathSettings(
            np.array([len(sequence) for sequence in sequences]),
            np.ascontiguousarray(rooms),
            np.array([each.temperature if each.is_sampled else 0.0 for each in samplings], np.float64),
            np.array([each.seed for each in samplings], np.int64),
            table.rates,
            price,
        )
        paths = PathTokens(
            np.empty((count, depth), np.int64),
            np.empty((count, depth), np.float32),
            np.empty((count, depth), np.float32),
            np.zeros(count, np.int64),
            np.zeros(count, np.int64),
        )
        hidden, states = output.hidden.numpy().copy(), output.state.numpy().copy()
        began = perf_counter()
        passes, stopped = draft_paths(self.network, self._cache, pages, starts, hidden, states, settings, paths)
        seconds = (perf_counter() - began) / (passes + 1)
        return DraftedPaths(_drafts_of(paths, source), paths.run, seconds if passes else None, bool(stopped))


def cache_of(attention: PlainAttention) -> NetworkCache:
    """Return the keys and values of float32 layers without latent attention, on a CPU."""
    keys, values = attention.pages
    assert values is not None
    return NetworkCache(keys.numpy(), values.numpy(), attention.first_slot)


def _page_tables(tables: SequenceOf[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return page tables one after the other, int64, and the first element of each, int64 [B]."""
    if len(tables) == 1:
        return np.array(tables[0], np.int64), np.zeros(1, np.int64)
    sizes = np.array([len(table) for table in tables])
    return np.array([page for table in tables for page in table], np.int64), np.cumsum(sizes) - sizes


def _drafts_of(paths: PathTokens, source: int) -> Drafts:
    """Return the paths as drafts; source: the `DraftSource` of all tokens."""
    is_drafted = np.arange(paths.tokens.shape[1]) < paths.counts[:, None]
    places = is_drafted.nonzero()[1]
    batch = DraftBatch(
        paths.tokens[is_drafted].astype(np.uint32),
        (places + ROOT).astype(np.int32),
        paths.accept_prob[is_drafted],
        np.full(len(places), source, np.uint8),
        offsets_of(paths.counts),
    )
    return Drafts(batch, scores=paths.scores[is_drafted])
