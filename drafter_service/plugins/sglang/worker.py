"""SGLang's worker for NGRAM with the drafts of a session."""

from __future__ import annotations

from typing import Any

import numpy as np

from drafter_service.plugins.log import HostLog
from drafter_service.plugins.options import HostLimits
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.settings import host_settings
from drafter_service.plugins.sglang.batch import BatchDrafts, accepted_tokens, ancestors, path_nodes
from ssd.budget.padding import Padding

LOG = HostLog("sglang.srt")


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
    """Open the session of a scheduler; the connection is opened by its first request."""
    revision = getattr(server_args, "revision", None) or ""
    settings = host_settings({}, "sglang", server_args.model_path, limits.vocab_size, LOG.warning, revision=revision)
    return HostSession(settings, limits, LOG.warning)


def broadcast(nodes: np.ndarray, group: Any) -> None:
    """Overwrite `nodes` with those of the group's first rank."""
    import torch

    torch.distributed.broadcast(torch.from_numpy(nodes), src=group.ranks[0], group=group.cpu_group)
