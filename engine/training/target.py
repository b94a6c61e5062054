"""Training of the small target model that ships with the project.

A run is a recipe and a work folder. An interrupted run continues from its last checkpoint with the same batches
as an uninterrupted one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.training.dataset import TrainingText

CHECKPOINT_FILE = "checkpoint.pt"
LOG_FILE = "log.jsonl"
CHECKPOINT_EVERY_S = 300.0
LOG_EVERY_STEPS = 50
EVALUATE_EVERY_STEPS = 1000


@dataclass(frozen=True)
class Recipe:
    """Everything besides the text that determines the result of a run."""

    hidden_size: int = 320
    intermediate_size: int = 832
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 4096
    max_positions: int = 2048
    total_tokens: int = 24_000_000
    """Tokens of the whole run, about 3 passes over the text."""
    batch_tokens: int = 8192
    short_context: int = 512
    """Context of the first part of the run; the full window would make it 1.5 times as slow."""
    long_share: float = 0.25
    """Share of the run, at its end, with the full context window."""
    warmup_steps: int = 200
    decay_share: float = 0.5
    """Share of the run, at its end, over which the learning rates decrease linearly to zero."""
    matrix_lr: float = 0.02
    """Learning rate of Muon, for the matrices of the layers (Jordan et al., 2024)."""
    matrix_weight_decay: float = 0.02
    other_lr: float = 1e-2
    """Learning rate of AdamW, for embeddings and norms."""
    seed: int = 0

    def model_config(self, end_of_text: int) -> ModelConfig:
        """Return the model's shape; `end_of_text`: the token that begins and ends every text."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_positions=self.max_positions,
            bos_token_id=end_of_text,
            eos_token_ids=(end_of_text,),
        )

    @property
    def steps(self) -> int:
        """Number of steps of the whole run."""
        return self.total_tokens // self.batch_tokens

    def context(self, step: int) -> int:
        """Return the number of tokens per row of a step's batch."""
        return self.max_positions if step >= self.steps * (1 - self.long_share) else self.short_context

    def rate(self, step: int) -> float:
        """Return the learning rate of a step as a share of its peak: warm-up, constant, linear decrease to zero."""
        left = (self.steps - step) / (self.decay_share * self.steps)
        return min(1.0, (step + 1) / self.warmup_steps, left)


@dataclass
class Run:
    """A training run in memory."""

    recipe: Recipe
    model: Decoder
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    seconds: float = 0.0
    """Time spent on steps, including those before interruptions."""
    losses: list[float] = field(default_factory=list)


def start(recipe: Recipe, config: ModelConfig) -> Run:
    """Return a run at step 0 with new weights."""
    torch.manual_seed(recipe.seed)
    model = Decoder(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            # Residual branches start at zero: the first steps then train as fast as in a shallow model.
            is_branch_end = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.0 if is_branch_end else 0.02)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers.")]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or not name.startswith("layers.")]
    muon = torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=recipe.matrix_weight_decay)
    adamw = torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0)
    return Run(recipe, model, [muon, adamw])


def train(
    run: Run,
    text: TrainingText,
    work: Path,
    *,
    compiled: bool,
    progress: Callable[[int, float], None],
) -> None:
    """Run the remaining steps, with a checkpoint every few minutes and one at the end.

    `progress` is called with (steps done, mean loss of the last steps in nats) after every step.
    """
    recipe = run.recipe
    loss_of = torch.compile(_batch_loss, dynamic=False) if compiled else _batch_loss
    peaks = (recipe.matrix_lr, recipe.other_lr)
    saved_at = time.monotonic()
    while run.step < recipe.steps:
        began = time.monotonic()
        inputs, targets = _batch(text.train, recipe, run.step)
        loss = loss_of(run.model, inputs, targets)
        loss.backward()
        for optimizer, peak in zip(run.optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * recipe.rate(run.step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        run.losses = [*run.losses, float(loss.detach())][-LOG_EVERY_STEPS:]
        run.step += 1
        run.seconds += time.monotonic() - began
        progress(run.step, float(np.mean(run.losses)))
        _log(run, text, work)
        if time.monotonic() - saved_at > CHECKPOINT_EVERY_S or run.step == recipe.steps:
            save(run, work)
            saved_at = time.monotonic()


def save(run: Run, work: Path) -> None:
    """Write the checkpoint atomically."""
    state = {
        "recipe": asdict(run.recipe),
        "step": run.step,
        "seconds": run.seconds,
        "model": run.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
    }
    partial = work / (CHECKPOINT_FILE + ".partial")
    torch.save(state, partial)
    partial.replace(work / CHECKPOINT_FILE)


def resume(recipe: Recipe, config: ModelConfig, work: Path) -> Run:
    """Return the run with the checkpoint in `work`, or a new one.

    Raises ValueError if the checkpoint was made with another recipe.
    """
    run = start(recipe, config)
    path = work / CHECKPOINT_FILE
    if path.exists():
        state = torch.load(path, weights_only=True)
        if state["recipe"] != asdict(recipe):
            raise ValueError(f"{path} was made with another recipe; use another work folder or remove it")
        run.model.load_state_dict(state["model"])
        for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        run.step, run.seconds = state["step"], state["seconds"]
    return run


@torch.no_grad()
def held_out_loss(model: Decoder, tokens: np.ndarray, *, skip: int, context: int, fast: bool) -> float:
    """Return the mean loss in nats of the tokens from `skip` on, each with at least half a context where available.

    `fast` computes in bfloat16, as training does.
    """
    half = context // 2
    total, count = 0.0, 0
    ids = torch.from_numpy(tokens.astype(np.int64))
    for start_at in range(0, len(ids) - 1, half):
        window = ids[start_at : start_at + context + 1]
        scored_from = max(skip, 1) if start_at == 0 else half + 1
        losses = token_losses(model, window[None, :-1], window[None, 1:], fast=fast)[scored_from - 1 :]
        total += float(losses.double().sum())
        count += len(losses)
        if start_at + context + 1 >= len(ids):
            break
    return total / count


def _batch(tokens: np.ndarray, recipe: Recipe, step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a step, int64 [B, T] each. Every pass has a different offset and order of
    windows."""
    context = recipe.context(step)
    rows = recipe.batch_tokens // context
    windows = (len(tokens) - 1) // context - 1
    first = step * rows
    picked = []
    for index in range(first, first + rows):
        rng = np.random.default_rng((recipe.seed, context, index // windows))
        shift = int(rng.integers(context))
        start_at = int(rng.permutation(windows)[index % windows]) * context + shift
        picked.append(tokens[start_at : start_at + context + 1].astype(np.int64))
    batch = torch.from_numpy(np.stack(picked))
    return batch[:, :-1], batch[:, 1:]


def _batch_loss(model: Decoder, inputs: Tensor, targets: Tensor) -> Tensor:
    return token_losses(model, inputs, targets, fast=True).mean()


def token_losses(model: Decoder, inputs: Tensor, targets: Tensor, *, fast: bool) -> Tensor:
    """Return the loss of each token in nats, float32 [B * T], for rows int64 [B, T]; `fast` computes in bfloat16."""
    rows, context = inputs.shape

    def attend(_layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.view(rows, context, -1, x.shape[-1]).transpose(1, 2) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(0, 1)

    positions = torch.arange(context).repeat(rows)
    with torch.autocast("cpu", torch.bfloat16, enabled=fast):
        logits = model.logits(model(inputs.flatten(), positions, attend))
    return F.cross_entropy(logits.float(), targets.flatten(), reduction="none")


def _log(run: Run, text: TrainingText, work: Path) -> None:
    if run.step % LOG_EVERY_STEPS and run.step != run.recipe.steps:
        return
    line: dict[str, float] = {"step": run.step, "seconds": round(run.seconds), "loss": float(np.mean(run.losses))}
    if run.step % EVALUATE_EVERY_STEPS == 0:
        sample = text.held_out[: 32 * run.recipe.short_context]
        line["held_out_loss"] = held_out_loss(run.model, sample, skip=1, context=run.recipe.short_context, fast=True)
    with (work / LOG_FILE).open("a") as log:
        log.write(json.dumps(line) + "\n")
