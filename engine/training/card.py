"""Scores of the trained target and of an n-gram model for comparison, and the model card."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from drafter_service.observability.measuring.results import cpu_name
from engine.models.decoder import Decoder
from engine.training.dataset import TrainingText
from engine.training.kneser_ney import ORDER, KneserNey
from engine.training.target import Recipe, held_out_loss

CARD_FILE = "README.md"


@dataclass(frozen=True)
class Score:
    """Loss of a model on the held-out tokens."""

    nats: float
    """Mean loss per token."""
    bytes_per_token: float

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return math.exp(self.nats)

    @property
    def bits_per_byte(self) -> float:
        """Loss per byte of text, comparable across vocabularies."""
        return self.nats / math.log(2) / self.bytes_per_token


def score_model(model: Decoder, text: TrainingText) -> Score:
    """Score the target on the held-out text in float32, with a context of 1,024 to 2,048 tokens where available."""
    nats = held_out_loss(model, text.held_out, skip=ORDER - 1, context=model.config.max_positions, fast=False)
    return Score(nats, text.held_out_bytes / len(text.held_out))


def score_ngram(text: TrainingText, vocab_size: int) -> Score:
    """Score an n-gram model of the training text on the same held-out tokens."""
    probabilities = KneserNey(text.train, vocab_size).probabilities(text.held_out)
    return Score(float(-np.log(probabilities).mean()), text.held_out_bytes / len(text.held_out))


def write_card(
    folder: Path, recipe: Recipe, text: TrainingText, model: Score, ngram: Score, *, parameters: int, seconds: float
) -> None:
    """Write the model card into `folder`."""
    trained_on, held_out = (len(text.files[side]) for side in ("train", "held_out"))
    (folder / CARD_FILE).write_text(
        f"""---
license: other
license_name: psf-2.0
language: [code]
library_name: transformers
---

# {folder.name}

A Llama-style model of {parameters / 1e6:.1f} million parameters that writes Python, made for trying and testing the engine
without a network. It was trained on the Python standard library only. Its output looks like library code, but is
rarely correct.

| on the held-out files | perplexity | bits per byte |
|---|---|---|
| this model | {model.perplexity:.2f} | {model.bits_per_byte:.3f} |
| interpolated Kneser-Ney {ORDER}-gram model (modified, three discounts) | {ngram.perplexity:.2f} | {ngram.bits_per_byte:.3f} |

The model's perplexity is {model.perplexity / ngram.perplexity:.2f} times the {ORDER}-gram model's. Both have the same vocabulary, the same
training and held-out text, and are scored on the same {len(text.held_out) - ORDER + 1:,} tokens.

## Data

The `.py` files of the standard library of CPython {text.files["python"]}, tests included, under the PSF license
(`LICENSE.txt`).
Left out: generated tables (`encodings`, `pydoc_data`), files that depend on the build, deliberately broken test files, and
files that are not UTF-8. `files.json` lists the {trained_on:,} files that were trained on ({len(text.train):,} tokens) and the {held_out} that
were held out ({len(text.held_out):,} tokens, {text.held_out_bytes:,} bytes). Files that share a quarter of their distinctive lines are near-duplicates and
stay on one side; the held-out groups were chosen at random. `prompts.jsonl` has functions of the held-out files as prompts.

## Recipe

| | |
|---|---|
| shape | {recipe.num_layers} layers of {recipe.hidden_size}, feed-forward {recipe.intermediate_size}, {recipe.num_heads} heads of {recipe.head_dim}, {recipe.num_kv_heads} key-value heads, tied embeddings |
| context window | {recipe.max_positions:,} tokens: the first {1 - recipe.long_share:.0%} of training at {recipe.short_context}, the rest at {recipe.max_positions:,} |
| vocabulary | byte-level BPE of {recipe.vocab_size:,}, learned from the training files |
| tokens seen | {recipe.total_tokens:,}, {recipe.total_tokens / len(text.train):.1f} passes, {recipe.batch_tokens:,} per step |
| optimizer | Muon for the matrices of the layers (learning rate {recipe.matrix_lr}, weight decay {recipe.matrix_weight_decay}), AdamW for the rest (learning rate {recipe.other_lr}) |
| schedule | {recipe.warmup_steps} steps of warm-up, then constant, linear to zero over the last {recipe.decay_share:.0%} |
| precision | bfloat16 matrix products with float32 weights; shipped as bfloat16 |
| hardware | {cpu_name()}, {torch.get_num_threads()} cores |
| time | {seconds / 60:.0f} minutes |

Made by `ssd-engine train target`. With the same CPython, the command reads the same files and samples the same
batches.
""",
        encoding="utf-8",
    )
