"""The loop that trains a draft head or a draft model, and its optimizer Muon in float32.

An interrupted run continues from its last checkpoint with the same batches as an uninterrupted one.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). `torch.optim.Muon` multiplies in
bfloat16, which processors without instructions for it do 25 times more slowly than float32.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.models.checkpoint import unpickle
from engine.models.decoder import Decoder
from engine.training.kinds import Recipe, new_objective
from engine.training.objectives import Objective, read_windows
from ssd.errors import UserError

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.775, 2.0315)
ITERATIONS = 5
CHECKPOINT_FILE = "checkpoint.pt"
CHECKPOINT_EVERY_S = 60.0
SMOOTHED_STEPS = 25
"""Number of steps over which the displayed tokens per step are averaged."""
VOCABULARY_WEIGHTS = ("embedding.weight", "lm_head.weight")
"""Matrices that AdamW trains, because their rows belong to tokens."""


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum with Nesterov's look-ahead, for matrices that have been trained before.

    Learning rates are relative to the singular values that a matrix begins with: their root mean square is the unit.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])

    def _update(self, parameter: nn.Parameter, lr: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
            state["unit"] = parameter.norm() / min(parameter.shape) ** 0.5
        momentum = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
        parameter.sub_(lr * state["unit"] * orthogonalize(gradient.lerp(momentum, MOMENTUM)))


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return a matrix [R, C] with the singular vectors of `matrix` and singular values of 0.7 to 1.2."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


@dataclass
class Run:
    """A training run in memory."""

    recipe: Recipe
    target: Decoder
    text: np.ndarray
    """uint32 [W, T]: windows in a random order."""
    module: nn.Module
    objective: Objective
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    seconds: float = 0.0
    """Time spent on steps, including those before interruptions."""
    recent: list[float] = field(default_factory=list)
    """Tokens per step, estimated on the last batches."""

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the target and of the text."""
        digest = hashlib.sha256(repr(self.target.config).encode())
        for name, weight in self.target.named_parameters():
            if weight.ndim == 1:  # all norms: no two trained models have the same
                digest.update(name.encode() + weight.detach().float().cpu().numpy().tobytes())
        digest.update(repr(self.text.shape).encode() + np.ascontiguousarray(self.text).tobytes())
        return digest.hexdigest()

    @property
    def tokens_per_step(self) -> float:
        """Mean estimate of the last batches: 1 + the number of accepted draft tokens."""
        return float(np.mean(self.recent)) if self.recent else 1.0


def start(recipe: Recipe, target: Decoder, text: np.ndarray) -> Run:
    """Return a run at step 0 with a new head for the target."""
    torch.manual_seed(recipe.seed)
    objective = new_objective(recipe, target, text)
    matrices, others = _parameters(objective.module)
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=recipe.matrix_lr),
        torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    return Run(recipe, target, text, objective.module, objective, optimizers)


def resume(recipe: Recipe, target: Decoder, text: np.ndarray, work: Path) -> Run:
    """Return the run with the checkpoint in `work`, or a new one.

    text: windows in a random order, uint32 [W, T]. Raises ValueError if the checkpoint was made with another recipe,
    text or target, and UserError if it is damaged.
    """
    run = start(recipe, target, text)
    path = work / CHECKPOINT_FILE
    if path.exists():
        state = unpickle(path, "delete it to train from the beginning")
        if state["recipe"] != asdict(recipe) or state["fingerprint"] != run.fingerprint:
            raise ValueError(f"{path} was made with another recipe, text or target; give another --work folder")
        run.module.load_state_dict(state["module"])
        for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        run.step, run.recent, run.seconds = state["step"], state["recent"], state["seconds"]
    return run


def train(run: Run, work: Path, *, until: int, progress: Callable[[Run], None]) -> None:
    """Run the steps before step `until`, with a checkpoint every minute and one at the end.

    Raises UserError if the training diverges.
    """
    work.mkdir(parents=True, exist_ok=True)
    saved_at = time.monotonic()
    while run.step < until:
        began = time.monotonic()
        _step(run)
        run.step += 1
        run.seconds += time.monotonic() - began
        progress(run)
        if time.monotonic() - saved_at > CHECKPOINT_EVERY_S or run.step == until:
            save(run, work)
            saved_at = time.monotonic()


def save(run: Run, work: Path) -> None:
    """Write the checkpoint. After a crash of the process or the machine, this one or the previous one is complete."""
    state = {
        "recipe": asdict(run.recipe),
        "fingerprint": run.fingerprint,
        "step": run.step,
        "seconds": run.seconds,
        "recent": run.recent,
        "module": run.module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
    }
    partial = work / (CHECKPOINT_FILE + ".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(work / CHECKPOINT_FILE)


def _step(run: Run) -> None:
    recipe = run.recipe
    tokens = run.text[_batch(recipe, len(run.text), run.step)]
    depths = run.objective(read_windows(run.target, tokens, run.objective.layers))
    loss = depths.losses.sum()
    if not torch.isfinite(loss):
        raise UserError(
            f"the loss of step {run.step} is not a finite number; give other --data or another --work folder"
        )
    loss.backward()
    for optimizer, peak in zip(run.optimizers, (recipe.matrix_lr, recipe.other_lr), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = peak * recipe.rate(run.step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    run.recent = [*run.recent, 1 + float(depths.accepted.sum())][-SMOOTHED_STEPS:]


def _batch(recipe: Recipe, windows: int, step: int) -> np.ndarray:
    """Return the windows of a step, int64 [B]. The first pass is in order of the windows, which is random already."""
    indices = np.arange(step * recipe.batch_windows, (step + 1) * recipe.batch_windows)
    return np.array([_in_pass(recipe.seed, windows, *divmod(int(index), windows)) for index in indices])


def _in_pass(seed: int, windows: int, number: int, index: int) -> int:
    return index if number == 0 else int(np.random.default_rng((seed, number)).permutation(windows)[index])


def _parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices that Muon trains, and the parameters for AdamW."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim == 2 and name not in VOCABULARY_WEIGHTS and not _is_projection(name)
            (matrices if is_matrix else others).append(parameter)
    return matrices, others


def _is_projection(name: str) -> bool:
    """Return whether a parameter is the output projection of a Medusa head: the last module of its sequence."""
    return name.startswith("heads.") and name.count(".") == 3
