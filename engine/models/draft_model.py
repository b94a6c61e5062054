"""Load a whole model as the drafter of another one with the same tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from drafter_service.client.gguf import is_gguf
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.loader import load_config, load_model
from engine.models.tokenizer import TOKENIZER_FILE, Tokenizer
from ssd.errors import UserError


def check_draft_model(folder: Path, target_folder: Path) -> ModelConfig:
    """Return the shape of the model in `folder`. Raises UserError unless it can draft for the one in `target_folder`.

    Both must have the same tokens, which are compared if both folders have a tokenizer. Only then the sizes of their
    vocabularies may differ: models of one series are padded to different sizes (Qwen2.5: 151,936 and 152,064) with
    rows that belong to no token.
    """
    if folder.exists() and target_folder.exists() and folder.samefile(target_folder):
        raise UserError(
            f"{folder} is the target itself, which drafts no faster than it decodes; give --draft-model a smaller "
            "model, or use --drafter self-int8"
        )
    draft, target = load_config(folder), load_config(target_folder)
    tokens = _common_tokens(folder, target_folder)
    if draft.vocab_size != target.vocab_size and (tokens is None or tokens > min(draft.vocab_size, target.vocab_size)):
        raise UserError(
            f"{folder} has a vocabulary of {draft.vocab_size}, but the target has one of {target.vocab_size}; "
            "give --draft-model a model with the target's tokenizer"
        )
    return draft


def load_draft_model(
    folder: Path, target_folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Decoder:
    """Return the model in `folder` with as many rows for tokens as the one in `target_folder`.

    Raises UserError like `check_draft_model` and `load_model`.
    """
    check_draft_model(folder, target_folder)
    return fit_vocabulary(load_model(folder, dtype=dtype, device=device), load_config(target_folder).vocab_size)


def fit_vocabulary(model: Decoder, vocab_size: int) -> Decoder:
    """Remove the last rows of a model's embedding and output projection, or add rows of zeros. Returns the model."""
    if vocab_size == model.config.vocab_size:
        return model
    ends = tuple(token for token in model.config.eos_token_ids if token < vocab_size)
    model.config = replace(model.config, vocab_size=vocab_size, eos_token_ids=ends)
    model.embedding.weight = nn.Parameter(_fitted(model.embedding.weight, vocab_size), requires_grad=False)
    model.embedding.num_embeddings = vocab_size
    model.lm_head.weight = nn.Parameter(_fitted(model.lm_head.weight, vocab_size), requires_grad=False)
    model.lm_head.out_features = vocab_size
    model.tie()
    return model


def _fitted(weight: Tensor, rows: int) -> Tensor:
    fitted = weight.new_zeros(rows, weight.shape[1])
    kept = min(rows, len(weight))
    fitted[:kept] = weight[:kept]
    return fitted


def _common_tokens(folder: Path, target_folder: Path) -> int | None:
    """Return the number of ids up to the last token of both tokenizers; None if a folder has none.

    Raises UserError if they differ.
    """
    if not all(is_gguf(each) or (each / TOKENIZER_FILE).exists() for each in (folder, target_folder)):
        return None
    drafts, targets = (Tokenizer(each).tokens() for each in (folder, target_folder))
    for token in sorted(drafts.keys() | targets.keys()):
        if drafts.get(token) != targets.get(token):
            raise UserError(
                f"{folder} has another tokenizer than the target: token {token} is {drafts.get(token)!r} there and "
                f"{targets.get(token)!r} in {target_folder}; give --draft-model a model with the target's tokenizer"
            )
    return max(targets, default=-1) + 1
