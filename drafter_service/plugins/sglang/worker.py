"""SGLang's worker for NGRAM with the drafts of a session."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from drafter_service.plugins.options import End, HostLimits, RequestOptions
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.settings import HostLog, host_settings
from ssd.budget.padding import Padding

LOG = HostLog("sglang.srt")

PADDING = 0
"""Token of the nodes beyond the draft, as for the host's NGRAM. They continue the draft's last node as a path: children
of one node with the same token would be accepted too often when sampling."""


def worker_class() -> type:
    """Return the host's worker for NGRAM with the drafts of this module."""
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative import ngram_worker

    class SsdWorker(ngram_worker.NGRAMWorker):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            own_corpus = ngram_worker.NgramCorpus
            ngram_worker.NgramCorpus = NoCorpus
            try:
                super().__init__(*args, **kwargs)
            finally:
                ngram_worker.NgramCorpus = own_corpus
            self._ssd_group = get_parallel().tp_group
            self._ssd_drafts: BatchDrafts | None = None
            # A late answer must not make ranks verify different drafts, so one of them drafts for all.
            if self._ssd_group.rank_in_group == 0:
                limits = limits_of(self.model_runner.model_config, self.draft_token_num, self.topk)
                session = open_session(self.server_args, limits)
                self._ssd_drafts = BatchDrafts(session, self.draft_token_num)

        def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
            """Return the tokens int64 [batch * K] and the ancestors bool [batch * K * K] of all nodes."""
            nodes = path_nodes(len(batch.reqs), self.draft_token_num)
            if self._ssd_drafts is not None:
                nodes = self._ssd_drafts.nodes(batch.reqs, accepted_tokens(batch, self.enable_overlap))
            if self._ssd_group.world_size > 1:
                broadcast(nodes, self._ssd_group)
            tokens, parents = nodes
            return tokens.reshape(-1), ancestors(parents)

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Do nothing: the drafter learns from the texts in `_prepare_draft_tokens`."""

        def clear_cache_pool(self) -> None:
            """Do nothing: the corpus is shared, and does not depend on the host's KV cache."""

        def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
            super().note_request_finished(rid=rid, natural_stop=natural_stop)
            if self._ssd_drafts is not None:
                self._ssd_drafts.finish(rid)

    return SsdWorker


class NoCorpus:
    """Takes the place of the host's own n-gram corpus, which would be compiled and would take memory."""

    def __init__(self, **_: Any) -> None:
        pass

    def erase_match_state(self, request_ids: list[str]) -> None:
        """Do nothing. Requests that left the batch may have been retracted; they have not ended."""


def limits_of(model_config: Any, nodes: int, width: int) -> HostLimits:
    """Return the limits of drafts of K nodes. width: maximum number of children of a node, 1 for paths."""
    vocab_size, context_window = model_config.vocab_size, model_config.context_len
    return HostLimits(nodes - 1, vocab_size, context_window, trees=width > 1, padding=Padding(lengths=(nodes - 1,)))


def open_session(server_args: Any, limits: HostLimits) -> HostSession:
    """Return the session of a scheduler, which is connected, and whose kernels are compiled."""
    revision = getattr(server_args, "revision", None) or ""
    settings = host_settings({}, "sglang", server_args.model_path, limits.vocab_size, LOG.warning, revision=revision)
    session = HostSession(settings, limits, LOG.warning, inform=LOG.info)
    session.open()
    return session


def broadcast(nodes: np.ndarray, group: Any) -> None:
    """Overwrite `nodes` with those of the group's first rank."""
    import torch

    torch.distributed.broadcast(torch.from_numpy(nodes), src=group.ranks[0], group=group.cpu_group)


class BatchDrafts:
    """The drafts of one scheduler's batches."""

    def __init__(self, session: HostSession, nodes: int) -> None:
        """nodes: K, the number of nodes per request."""
        self.session = session
        self._nodes = nodes
        self._requests: dict[str, weakref.ref[Any]] = {}
        """The requests that the session follows. The host does not report the end of all: retracted, then aborted."""

    def nodes(self, requests: Sequence[Any], accepted: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the nodes of a batch, int64 [2, B, K]: their tokens, and the indices of their parents, -1 for none.

        accepted: tokens of each request that the host has not yet added to its output.
        """
        nodes = path_nodes(len(requests), self._nodes)
        nodes[0, :, 0] = [
            (tokens or request.output_ids or request.origin_input_ids_unpadded)[-1]
            for request, tokens in zip(requests, accepted, strict=True)
        ]
        with self.session.guarded():
            running = [
                (at, request.rid, JoinedText(request.origin_input_ids_unpadded, request.output_ids, tokens))
                for at, (request, tokens) in enumerate(zip(requests, accepted, strict=True))
                if not has_stopped(request, tokens)
            ]
            for at, _, _ in running:
                self._follow(requests[at])
            drafts = self.session.draft_trees([(rid, text) for _, rid, text in running])
            for (at, rid, _), draft in zip(running, drafts, strict=True):
                self.session.schedule({rid: draft.tokens})
                end = 1 + len(draft)
                nodes[0, at, 1:end] = draft.tokens
                nodes[1, at, 1:end] = draft.parents
                nodes[1, at, 1:end] += 1  # The first node is the last committed token.
        return nodes

    def finish(self, rid: str) -> None:
        """End a request of which the host says that it has ended. Does nothing for one that had no drafts."""
        with self.session.guarded():
            request = self._requests.pop(rid, lambda: None)()
            if request is None:
                self.session.finish(rid, end=End.CANCELLED)
                return
            text = [*request.origin_input_ids_unpadded, *request.output_ids_through_stop]
            was_aborted = type(request.finished_reason).__name__ == "FINISH_ABORT"
            self.session.finish(rid, text, End.CANCELLED if was_aborted else End.FINISHED)

    def _follow(self, request: Any) -> None:
        """Start a request, unless it is followed; end those that the host has dropped."""
        known = self._requests.get(request.rid)
        if known is not None and known() is request:
            return
        for rid in [rid for rid, reference in self._requests.items() if reference() is None]:
            del self._requests[rid]
            self.session.finish(rid, end=End.CANCELLED)
        self._requests[request.rid] = weakref.ref(request)
        custom = request.sampling_params.custom_params
        extras = custom if isinstance(custom, dict) else {}
        self.session.start(request.rid, list(request.origin_input_ids_unpadded), options_of(request), extras)


class JoinedText(Sequence[int]):
    """The tokens of several arrays or lists, which are copied only where they are read."""

    def __init__(self, *parts: Sequence[int]) -> None:
        self._parts = parts
        self._length = sum(map(len, parts))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            at = range(self._length)[index]
            return self[at : at + 1][0]
        start, stop, _ = index.indices(self._length)
        tokens: list[int] = []
        for part in self._parts:
            length = len(part)
            if start < length and stop > 0:
                tokens += part[max(start, 0) : stop]
            start, stop = start - length, stop - length
        return tokens


def options_of(request: Any) -> RequestOptions:
    """Return the options of a host's request. The host separates caches by salt, and by a key of its own."""
    return RequestOptions(
        max_tokens=request.sampling_params.max_new_tokens,
        salt="".join(f"{len(part)}:{part}" for part in (request.cache_salt, request.extra_key) if part),
        adapter=request.lora_id or "",
        session=request.session_id or "",
    )


def has_stopped(request: Any, accepted: Sequence[int]) -> bool:
    """Return whether a request ends within tokens that the host has not looked at yet.

    The host looks for stop tokens one step late. What the target produced after one is not part of the output.
    """
    if request.sampling_params.ignore_eos or not accepted:
        return False
    tokenizer = request.tokenizer
    stops = [request.sampling_params.stop_token_ids, request.eos_token_ids]
    if tokenizer is not None:
        stops += [[tokenizer.eos_token_id], getattr(tokenizer, "additional_stop_token_ids", None)]
    return not set(accepted).isdisjoint(chain.from_iterable(stop or () for stop in stops))


def accepted_tokens(batch: Any, is_overlapped: bool) -> list[list[int]]:
    """Return the tokens of each request that the host has not yet added to its output: those of the step before.

    There are none without overlap, nor in batches with a grammar, which the host runs without overlap.
    """
    if not is_overlapped or batch.grammar_needs_sync():
        return [[] for _ in batch.reqs]
    counts = batch.spec_info.accept_lens.cpu().tolist()
    rows = batch.spec_info.accept_tokens.cpu().reshape(len(counts), -1).tolist()
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def path_nodes(batch: int, nodes: int) -> np.ndarray:
    """Return nodes that are paths of padding, int64 [2, batch, nodes]."""
    paths = np.full((2, batch, nodes), PADDING, np.int64)
    paths[1] = np.arange(-1, nodes - 1)
    return paths


def ancestors(parents: np.ndarray) -> np.ndarray:
    """Return which nodes are ancestors of each node or the node itself, bool [B * K * K], from parents int64 [B, K].

    Parents come before their children, and the first node has none.
    """
    batch, nodes = parents.shape
    mask = np.zeros((batch, nodes, nodes), bool)
    rows = np.arange(batch)
    mask[:, 0, 0] = True
    for node in range(1, nodes):
        mask[:, node] = mask[rows, parents[:, node]]
        mask[:, node, node] = True
    return mask.reshape(-1)
