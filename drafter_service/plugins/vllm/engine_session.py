"""The session of an engine of vLLM, and its log."""

from __future__ import annotations

from typing import Any

from drafter_service.plugins.log import HostLog
from drafter_service.plugins.options import HostLimits
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.vllm.requests import settings_of
from drafter_service.plugins.vllm.variants import Variant, choose
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
    session = HostSession(settings, limits, LOG.warning)
    LOG.info(f"up to {limits.max_draft} draft tokens per step from {settings.sidecar}")
    session.open()
    return session
