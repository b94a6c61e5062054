"""Choose the backend of attention and of a model's small operations (`--attention`)."""

from __future__ import annotations

from typing import Literal

import torch

from engine.attention.base import Attention
from engine.attention.flashinfer import FlashInferAttention, FusedOps, flashinfer, has_flashinfer
from engine.attention.plain import LatentPlainAttention, PlainAttention
from engine.models.config import ModelConfig
from engine.models.layers import PLAIN, Ops
from ssd.errors import UserError

Backend = Literal["plain", "flashinfer"]

HEAD_DIMS = (64, 128, 256)
"""Head dimensions for which FlashInfer has kernels."""
DTYPES = (torch.bfloat16, torch.float16)


def choose_backend(wanted: str, config: ModelConfig | None, dtype: torch.dtype, device: str) -> Backend:
    """Return the backend for `auto`, `plain` or `flashinfer`. config: None skips the check of the model's head size.

    Raises UserError for FlashInfer if it cannot run.
    """
    if wanted == "plain":
        return "plain"
    obstacle = _obstacle(config, dtype, device)
    if wanted == "auto":
        return "flashinfer" if obstacle is None and has_flashinfer() else "plain"
    if obstacle is not None:
        raise UserError(f"--attention flashinfer {obstacle}")
    flashinfer()
    return "flashinfer"


def make_attention(
    backend: Backend,
    config: ModelConfig,
    pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: str,
    first_slot: int = 0,
) -> Attention:
    """Return an attention with an empty cache.

    first_slot: slots of a sequence before it are not attended to, and no queries may be there. FlashInfer attends to
    them nevertheless, and so to what an earlier owner of the page left there: that changes drafts, but no outputs.

    Raises UserError if FlashInfer cannot be imported.
    """
    if backend == "flashinfer":
        return FlashInferAttention(config, pages, page_size, dtype, device)
    plain = PlainAttention if config.latent is None else LatentPlainAttention
    return plain(config, pages, page_size, dtype, device, first_slot=first_slot)


def make_ops(backend: Backend) -> Ops:
    """Return the small operations of a model. Raises UserError if FlashInfer cannot be imported."""
    return FusedOps() if backend == "flashinfer" else PLAIN


def _obstacle(config: ModelConfig | None, dtype: torch.dtype, device: str) -> str | None:
    """Return the end of an error message that says why FlashInfer cannot run a model on a device; None if it can."""
    if torch.device(device).type != "cuda":
        return f"needs a CUDA device, not {device!r}; give --device cuda, or --attention plain"
    if dtype not in DTYPES:
        return "computes in 16 bits; give --dtype bfloat16, or --attention plain"
    if config is not None and config.latent is not None:
        return "runs no latent attention in this engine; give --attention plain"
    if config is not None and config.head_dim not in HEAD_DIMS:
        return f"has no kernels for heads of {config.head_dim}; give --attention plain"
    return None
