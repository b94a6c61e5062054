"""`ssd-engine train target`: the training run behind a progress bar."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine.training.run import train_target
from engine.training.target import Recipe
from ssd.errors import UserError


def train_with_progress(work: Path, out: Path, tokens: int | None, compiled: bool) -> None:
    """Train to the end of the recipe. Raises UserError if `work` belongs to another recipe."""
    recipe = Recipe() if tokens is None else replace(Recipe(), total_tokens=tokens)
    console = Console()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]}"), console=console) as progress:
        task = progress.add_task("training", total=recipe.steps, loss="-")
        try:
            train_target(
                recipe,
                work,
                out,
                compiled=compiled,
                say=console.print,
                progress=lambda step, loss: progress.update(task, completed=step, loss=f"{loss:.3f}"),
            )
        except ValueError as problem:
            raise UserError(str(problem)) from None
