"""The session of an engine of vLLM, and its log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drafter_service.client.identity import process_name
from drafter_service.plugins.log import HostLog
from drafter_service.plugins.options import HostLimits
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.vllm.requests import settings_of
from drafter_service.plugins.vllm.variants import Variant, choose
from drafter_service.transport.wire import MAX_ENGINE_NAME
from ssd.budget.padding import MAX_SIZES, NO_PADDING, Padding
from ssd.config import MAX_DRAFT

LOG = HostLog("vllm")


def variant_of(vllm_config: Any) -> Variant:
    """Return the variant of a configuration, and log why there is none.

    Raises ValueError for a configuration with which the engine must not start.
    """
    choice = choose(vllm_config)
    if choice.is_error:
        raise ValueError(f"ssd-drafter: {choice.reason}")
    if choice.variant is Variant.NONE:
        LOG.warning(f"{choice.reason}; serving without drafts")
    return choice.variant


def padding_of(compilation: Any) -> Padding:
    """Return the shapes that vLLM pads steps to, by its `CompilationConfig`: those of its CUDA graphs."""
    if compilation.cudagraph_mode is None or compilation.cudagraph_mode.name == "NONE":
        return NO_PADDING
    sizes = sorted({*(compilation.cudagraph_capture_sizes or ())}, reverse=True)
    interval = -(-len(sizes) // MAX_SIZES)  # A drafter takes a limited number.
    return Padding(tuple(reversed(sizes[:: max(1, interval)])))


def engine_name(name: str, parallel: Any) -> str:
    """Return the name of an engine, with its data-parallel rank above 0: all ranks have the same settings.

    parallel: vLLM's `ParallelConfig`. For a dense model its `data_parallel_rank` is 0 in every rank; its index is not.
    """
    rank = getattr(parallel, "data_parallel_index", 0)
    suffix = f":dp{rank}" if rank else ""
    return (name or process_name())[: MAX_ENGINE_NAME - len(suffix)] + suffix


def open_session(vllm_config: Any, padding: Padding = NO_PADDING) -> HostSession:
    """Return the session of an engine. padding: see `HostLimits`. Raises UserError for settings that are not valid."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    drafts = vllm_config.speculative_config.num_speculative_tokens
    limits = HostLimits(
        max_draft=min(drafts, MAX_DRAFT),
        vocab_size=model.get_vocab_size(),
        context_window=model.max_model_len,
        max_requests=max(HostLimits.max_requests, 2 * scheduler.max_num_seqs),
        padding=padding,
    )
    settings = settings_of(model, LOG.warning)
    settings = replace(settings, engine=engine_name(settings.engine, vllm_config.parallel_config))
    session = HostSession(settings, limits, LOG.warning)
    LOG.info(f"up to {limits.max_draft} draft tokens per step from {settings.sidecar}")
    session.open()
    return session
