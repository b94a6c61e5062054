"""Train the shipped model with GRPO: TRL's trainer, with rollouts of this project's engine."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any
from warnings import catch_warnings, simplefilter

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer

from benchmarks.rollouts.engines import Engines, Sample
from benchmarks.rollouts.problems import Settings, read_problems
from benchmarks.support import say
from engine.models.shipped import SHIPPED_MODEL
from engine.scheduling.request import Completion, FinishReason

MICRO_BATCH = 16
"""Largest number of samples in a part of the batch; gradients of parts are summed. Larger parts need more memory."""


@dataclass(eq=False)
class Step:
    """One training step."""

    prompts: list[list[int]]
    """In the order of the samples: the samples of a group are adjacent."""
    completions: list[Completion]
    rollout_s: float
    cpu_s: float
    """Processor time of the rollouts, all engines together."""
    update_s: float
    """Time to replace the weights before the rollouts."""
    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of each part of the batch."""

    @property
    def outputs(self) -> list[list[int]]:
        """Output tokens of each sample."""
        return [each.tokens.tolist() for each in self.completions]

    @property
    def tokens(self) -> int:
        """Number of output tokens."""
        return sum(len(each.tokens) for each in self.completions)

    @property
    def verify_steps(self) -> int:
        """Number of verify steps, counted per sequence."""
        return sum(each.steps for each in self.completions)


@dataclass(eq=False)
class Run:
    """One run: its steps, and a digest of the final weights."""

    steps: list[Step] = field(default_factory=list)
    weights: str = ""
    """SHA-256 of the final weights."""
    seconds: float = 0.0


class Trainer(GRPOTrainer):
    """Records the loss of each part of the batch, which logs round."""

    run: Run

    def training_step(self, *arguments: Any) -> torch.Tensor:
        """Compute gradients of one part."""
        loss = super().training_step(*arguments)
        self.run.steps[-1].losses.append(loss.item())
        return loss


class Watch(TrainerCallback):
    """Logs each step, and ends the training after a number of steps or, without one, after a time."""

    def __init__(self, run: Run, drafter: str, steps: int | None, seconds: float) -> None:
        self._run, self._drafter, self._steps, self._ends = run, drafter, steps, perf_counter() + seconds

    def on_step_end(self, _arguments: Any, _state: Any, control: Any, **_: Any) -> None:
        """Log the step; end the training after the last one."""
        number, step = len(self._run.steps), self._run.steps[-1]
        say(
            f"{self._drafter}, step {number - 1}: reward {sum(step.rewards) / len(step.rewards):.3f}, "
            f"{step.tokens:,} tokens in {step.rollout_s:.2f} s ({step.cpu_s:.2f} s of processor time), "
            f"{step.tokens / step.verify_steps:.2f} tokens per step"
        )
        is_late = perf_counter() >= self._ends
        control.should_training_stop = is_late if self._steps is None else number >= self._steps


def train(
    settings: Settings, engines: Engines, drafter: str, out: Path, steps: int | None, seconds: float = 0.0
) -> Run:
    """Train for a number of steps or, without one, for a time, and return what happened."""
    run, problems = Run(), read_problems(settings.problems)
    numbers = {problem.prompt: number for number, problem in enumerate(problems)}
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    encoded = [tokenizer(problem.prompt)["input_ids"][-settings.prompt_tokens :] for problem in problems]

    def roll(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        version, groups = trainer.state.global_step, [numbers[prompt] for prompt in prompts]
        samples = [Sample(version, group, number % settings.samples) for number, group in enumerate(groups)]
        began = perf_counter()
        engines.update(trainer.model.state_dict(), version)
        updated = perf_counter()
        completions, cpu_s = engines.roll(samples)
        ended = perf_counter()
        ids = [encoded[group] for group in groups]
        run.steps.append(Step(ids, completions, ended - updated, cpu_s, updated - began))
        return {"prompt_ids": ids, "completion_ids": run.steps[-1].outputs, "logprobs": None}

    def reward(prompts: list[str], **_: Any) -> list[float]:
        step = run.steps[-1]
        step.rewards = [
            problems[numbers[prompt]].reward(each.text or "", is_complete=each.finish_reason is FinishReason.STOP)
            for prompt, each in zip(prompts, step.completions, strict=True)
        ]
        return step.rewards

    began, batch = perf_counter(), settings.problems * settings.samples
    part = math.gcd(batch, MICRO_BATCH)
    torch.set_num_threads(settings.threads)
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32)
    configuration = GRPOConfig(
        str(out / "trainer"),
        per_device_train_batch_size=part,
        gradient_accumulation_steps=batch // part,
        num_generations=settings.samples,
        max_completion_length=settings.max_tokens,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        max_steps=10_000,
        shuffle_dataset=False,
        seed=settings.seed,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    with catch_warnings():
        simplefilter("ignore", FutureWarning)  # TRL 1.16 uses a name that transformers 5.24 deprecates
        trainer = Trainer(
            model,
            reward,
            configuration,
            Dataset.from_list([{"prompt": problem.prompt} for problem in problems]),
            processing_class=tokenizer,
            callbacks=[Watch(run, drafter, steps, seconds)],
            rollout_func=roll,
        )
        trainer.run = run
        trainer.remove_callback(PrinterCallback)  # the last line of the output is the document
        trainer.train()
    digest = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        digest.update(tensor.numpy().tobytes())
    run.weights, run.seconds = digest.hexdigest(), perf_counter() - began
    return run
