"""Build the engine that a command's options describe."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from drafter_service.client.connection import AbsentError, check_address
from engine.attention.backend import choose_backend
from engine.commands.options import EngineOptions
from engine.drafters.base import TargetInfo
from engine.drafters.registry import build_drafter, check_kind, configure, parse_kinds, runs_model
from engine.engine import COMMON_SAMPLING, Engine, build_engine
from engine.executor.ranks.load import load_ranks
from engine.models.decoder import Decoder
from engine.models.folders import load_generation_defaults
from engine.models.loader import DTYPES, load_config, load_model, load_quantization
from engine.models.lora.format import check_adapters
from engine.models.lora.pool import AdapterPool
from engine.models.packed import pack
from engine.models.sharding import ShardedDecoder, load_vocabulary
from engine.models.tokenizer import Tokenizer
from engine.sampling.grammar_state import GrammarCompiler
from ssd.config import MAX_DRAFT, DrafterConfig
from ssd.corpus.processors import usable_processors
from ssd.errors import UserError

THREADS_PER_PROCESSOR = 4
"""Limit of --threads, far above useful values; OpenMP crashes the process if it cannot create its threads."""


def load(options: EngineOptions) -> Decoder:
    """Load and pack the model. Raises UserError; errors that do not depend on the model are raised before loading
    it."""
    device = find_device(options.device)
    dtype = find_dtype(options.dtype, device)
    choose_backend(options.attention, None, dtype, device)
    if options.threads:
        _set_threads(options.threads)
    if "ssd-remote" in options.drafters:
        with suppress(*([] if options.require_sidecar else [AbsentError])):
            check_address(options.address)
    drafter_config = configure(options.drafter, DrafterConfig(), options.drafter_options)
    for kind in parse_kinds(options.drafter):
        check_kind(kind, drafter_config, options.draft_folders.get(kind), options.folder)
    count = options.tensor_parallel
    if count > 1:
        _refuse_divided(options, count)
        if not options.threads:
            torch.set_num_threads(max(1, len(usable_processors()) // count))
        return load_ranks(options.folder, count, dtype=dtype, device=device, threads=torch.get_num_threads())
    check_adapters(options.loras, load_config(options.folder))
    return pack(load_model(options.folder, dtype=dtype, device=device))


def _refuse_divided(options: EngineOptions, count: int) -> None:
    """Raise UserError for options that cannot be used with a model that is divided over `count` ranks."""
    if options.loras:
        raise UserError(f"--lora cannot be combined with --tensor-parallel {count} yet; leave one of them out")
    if "self-int8" in options.drafters:
        raise UserError(
            f"--drafter self-int8 reads the keys and values of the whole target, which --tensor-parallel {count} "
            "divides; choose another drafter, such as draft-model"
        )


def _set_threads(threads: int) -> None:
    most = THREADS_PER_PROCESSOR * len(usable_processors())
    if threads > most:
        raise UserError(
            f"--threads {threads}: give at most {most}, {THREADS_PER_PROCESSOR} per processor that this process may use"
        )
    torch.set_num_threads(threads)


def find_device(wanted: str) -> str:
    """Return the device name after checking that it exists; for `auto` a GPU if there is one. Raises UserError."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=wanted).cpu()  # `meta` tensors have no data to copy back
    except (RuntimeError, AssertionError, ImportError):
        raise UserError(f"--device {wanted}: PyTorch finds no such device here; give cpu, or leave it out") from None
    return wanted


def find_dtype(wanted: str, device: str) -> torch.dtype:
    """Return the dtype to compute in; for `auto` float32 on a CPU, otherwise bfloat16."""
    if wanted == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return DTYPES[wanted]


def launch(
    model: Decoder,
    tokenizer: Tokenizer,
    options: EngineOptions,
    warn: Callable[[str], None],
    notify: Callable[[str], None],
    *,
    verifies_all: bool = False,
) -> Engine:
    """Build the engine around a loaded model. `warn`: as in `build_drafter`. `notify`: as in `build_engine`.

    `verifies_all`: verify all draft tokens, even if that takes more time than it saves. Raises UserError.
    """
    config = options.config
    may_draft = options.drafter != "none" and config.max_draft > 0
    drafter_config = DrafterConfig(draft_shape=config.draft_shape, max_draft=min(2 * config.max_draft + 1, MAX_DRAFT))
    if (quantization := load_quantization(options.folder)) is not None:
        for notice in quantization.notices:
            warn(notice)
    target = TargetInfo.from_model(model, config, options.folder)
    if isinstance(model, ShardedDecoder) and any(runs_model(kind) for kind in options.drafters):
        # Networks that draft run on rank 0 alone, so they need an undivided embedding and output projection.
        vocabulary = load_vocabulary(options.folder, dtype=target.dtype, device=str(target.device))
        target = replace(target, model=pack(vocabulary))
    drafter: Any = build_drafter(
        options.drafter,
        configure(options.drafter, drafter_config, options.drafter_options),
        target,
        draft_models=options.draft_folders,
        address=options.address,
        require_sidecar=options.require_sidecar,
        warn=warn,
        notify=notify,
        adapters=options.loras,
    )
    # Attached last: what was built before runs the model without adapters.
    adapters = check_adapters(options.loras, model.config)
    pool = AdapterPool(model, adapters) if adapters else None
    common: dict[str, Any] = {**load_generation_defaults(options.folder).sampling}
    return build_engine(
        model, config, drafter, tokenizer.decode,
        has_budget=may_draft and not verifies_all, attention=options.attention,
        common=replace(COMMON_SAMPLING, **common), notify=notify, warn=warn, drafters=options.drafters,
        grammars=GrammarCompiler(tokenizer, model.config.vocab_size, model.config.eos_token_ids), adapters=pool,
    )  # fmt: skip
