"""Speculators of vLLM's V2 model runner: one that proposes nothing, and those that draft from the corpus.

With asynchronous scheduling the scheduler is a step ahead, so drafts are made in a worker. The first tensor-parallel
rank waits for the tokens of a step, requests drafts, and sends these to the others on the device, so that these do not
wait. With pipeline parallelism these are the ranks of the last stage, whose drafts vLLM sends to the other stages.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from drafter_service.plugins.vllm.engine import open_session, padding_of
from drafter_service.plugins.vllm.variants import NETWORKS
from drafter_service.plugins.vllm.worker_drafts import WorkerDrafts
from ssd.budget.padding import Padding


@functools.cache
def null_speculator_class() -> type:
    """Return the class of a speculator that drafts nothing. The runner verifies drafts only if it has a speculator."""
    import torch
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    class NullSpeculator(BaseSpeculator):  # type: ignore[misc]
        supports_mm_inputs = False
        draft_logits = None

        def __init__(self, vllm_config: Any, device: Any) -> None:
            speculative, most = vllm_config.speculative_config, vllm_config.scheduler_config.max_num_seqs
            self.max_draft, self.device = speculative.num_speculative_tokens, device
            self.enable_adaptive_verification = speculative.enable_adaptive_verification
            self.draft_token_confidence_probs = torch.zeros(most, self.max_draft, device=device)

        def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
            """Do nothing."""

        def capture(self) -> None:
            """Do nothing."""

        def propose(self, input_batch: Any, *_: Any, **__: Any) -> Any:
            """Return zeros, int64 [requests, K]."""
            return torch.zeros(input_batch.num_reqs, self.max_draft, dtype=torch.int64, device=self.device)

    return NullSpeculator


@functools.cache
def speculator_class(base: type) -> type:
    """Return a subclass of a speculator of vLLM, or of `NullSpeculator`, that also drafts from the corpus."""
    import torch
    from vllm.distributed import parallel_state

    class Speculator(base):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, device: Any) -> None:
            super().__init__(vllm_config, device)
            self._group = parallel_state.get_tp_group()
            self._lengths = lengths_by_requests(vllm_config)
            self._has_network = vllm_config.speculative_config.method in NETWORKS
            self.sampled: Any = None
            """Tokens of the step, int64 [requests, up to K + 1], on the device."""
            self._kept = torch.zeros(len(self._lengths), dtype=torch.int32, device=device)
            """Length of the network's draft that each request was given unchanged, by its row of the runner."""
            self.drafts: WorkerDrafts | None = None
            self._open(vllm_config)

        def _open(self, vllm_config: Any) -> None:
            """Connect, on the first rank: a late answer must not make ranks verify different drafts."""
            if self._group.rank_in_group == 0:
                # With this backend each rank has a scheduler, and only the first would know a length that is chosen.
                is_per_rank = vllm_config.parallel_config.distributed_executor_backend == "external_launcher"
                is_fixed = self._has_network or (is_per_rank and self._group.world_size > 1)
                lengths = [] if is_fixed else sorted({*self._lengths[1:]})
                self.drafts = open_drafts(vllm_config, lengths, is_adaptive=self.enable_adaptive_verification)

        def verify_equal_lengths(self, vllm_config: Any) -> None:
            """Draft for a host whose requests verify the same number of draft tokens."""
            self.enable_adaptive_verification = False
            if self.drafts is not None:
                self.drafts.close()
            self._open(vllm_config)

        def propose(
            self,
            input_batch: Any,
            attn_metadata: Any,
            slot_mappings: Any,
            last_hidden_states: Any,
            aux_hidden_states: Any,
            num_sampled: Any,
            num_rejected: Any,
            *args: Any,
            dummy_run: bool = False,
            num_speculative_tokens: int | None = None,
            **kwargs: Any,
        ) -> Any:
            """Return the drafts for the next step, int64 [requests, K], after the tokens of this one are known.

            Runs without requests copy as much as others do, since vLLM measures in them how long drafting takes.
            """
            length = self._lengths[input_batch.num_reqs] if self._has_network else 0
            if num_speculative_tokens is not None:
                length = min(length, num_speculative_tokens)
            given = attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected
            network = super().propose(
                input_batch, *given, *args, dummy_run=dummy_run, num_speculative_tokens=length, **kwargs
            )
            drafts, accept_prob = torch.empty_like(network), torch.empty(network.shape, device=network.device)
            if self.drafts is not None:
                rows = len(network)
                sampled = network if dummy_run else self.sampled
                counts = torch.stack((num_sampled[:rows], num_rejected[:rows]), 1)
                # One copy from the device, which waits for the step.
                step = torch.cat((counts.to(sampled.dtype), sampled, network[:, :length]), 1).cpu().numpy()
                sampled_counts, rejected = step[:, 0], step[:, 1]
                tokens, own = np.split(step[:, 2:], [sampled.shape[1]], axis=1)
                found = self.drafts.after_step(
                    [""] * rows if dummy_run else input_batch.req_ids,
                    tokens,
                    sampled_counts,
                    np.maximum(sampled_counts + rejected - 1, 0),
                    own,
                    0 if dummy_run else input_batch.num_tokens,
                )
                drafts, accept_prob = (to_device(array, self.device) for array in found)
            drafts = self._group.broadcast(drafts, src=0)
            if self.enable_adaptive_verification:
                accept_prob = self._group.broadcast(accept_prob, src=0)
                confidence = self.draft_token_confidence_probs[: len(network)]
                confidence.copy_(torch.where(accept_prob < 0, confidence, accept_prob))
            if not dummy_run:
                is_kept = (drafts[:, :length] == network[:, :length]).all(1)
                self._kept[input_batch.idx_mapping] = length * is_kept.to(torch.int32)
            return drafts

        def observe_verification(self, idx_mapping: Any, num_sampled: Any, num_rejected: Any) -> None:
            """Report to vLLM, which learns how reliable its network is, only tokens of the network's whole drafts."""
            kept = self._kept[idx_mapping]
            sampled = torch.minimum(num_sampled, kept + 1) * (kept > 0)
            rejected = torch.minimum(num_rejected, kept + 1 - sampled) * (kept > 0)
            super().observe_verification(idx_mapping, sampled, rejected)

    return Speculator


def open_drafts(vllm_config: Any, lengths: list[int], *, is_adaptive: bool) -> WorkerDrafts:
    """Return the drafts of a worker. Raises UserError for settings that are not valid.

    lengths: those of a step's drafts, if several can be chosen. is_adaptive: whether each request has its own.
    """
    longest = vllm_config.speculative_config.num_speculative_tokens
    has_choice = len(lengths) > 1 and not is_adaptive
    padding = Padding(lengths=tuple(lengths) if has_choice else (longest,))
    return WorkerDrafts(
        open_session(vllm_config, padding_of(vllm_config.compilation_config) if is_adaptive else padding),
        longest,
        vllm_config.model_config.max_model_len,
        lengths=lengths if has_choice else (),
        # Pipeline stages run several steps at a time.
        measures=(has_choice or is_adaptive) and vllm_config.parallel_config.pipeline_parallel_size == 1,
    )


def lengths_by_requests(vllm_config: Any) -> list[int]:
    """Return the length of drafts that vLLM chooses for each number of requests in a step, from 0."""
    speculative, most = vllm_config.speculative_config, vllm_config.scheduler_config.max_num_seqs
    longest = speculative.num_speculative_tokens
    if not speculative.num_speculative_tokens_per_batch_size:
        return [longest] * (most + 1)
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    lengths: list[int] = build_dynamic_sd_schedule_lookup(
        speculative.num_speculative_tokens_per_batch_size, most, longest
    )
    return lengths


def to_device(array: np.ndarray, device: Any) -> Any:
    """Copy an array to a device without waiting for the work that runs there."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
