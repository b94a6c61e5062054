"""`ssd-engine generate`: prompts in, completions and a summary out."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine.build import SHIPPED_MODEL, build_engine
from engine.config import EngineConfig
from engine.core import Engine, StepReport
from engine.drafters.build import build_drafter
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.request import Completion, Request, SamplingParams
from engine.tokenizer import Tokenizer
from ssd.config import DrafterConfig
from ssd.errors import UserError


@dataclass(frozen=True)
class GenerateOptions:
    """What the command line asked for; see its help."""

    prompts: tuple[str, ...]
    path: Path | None
    model: Path | None
    drafter: str
    address: str
    max_tokens: int
    temperature: float
    seed: int
    max_draft: int
    max_sequences: int
    threads: int | None
    output: Path | None


def run_generate(options: GenerateOptions) -> None:
    """Read the prompts, check all of them, complete them, and print. Raises UserError before anything runs."""
    prompts = read_prompts(options)
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise UserError(f"cannot write {options.output}: there is no directory {options.output.parent}")
    if options.threads:
        torch.set_num_threads(options.threads)
    folder = options.model or SHIPPED_MODEL
    model = pack(load_model(folder))
    tokenizer = Tokenizer(folder)
    sampling = SamplingParams(options.max_tokens, options.temperature, options.seed)
    requests = [Request(_as_tokens(prompt, tokenizer), sampling) for prompt in prompts]
    for number, request in enumerate(requests, start=1):
        try:
            request.check(model.config)
        except UserError as problem:
            raise UserError(f"prompt {number}: {problem}") from None
    console = Console(stderr=True, highlight=False)
    drafter = build_drafter(
        options.drafter,
        DrafterConfig(max_draft=max(1, options.max_draft)),
        options.address,
        warn=lambda text: console.print(f"[yellow]warning:[/] {text}"),
    )
    config = EngineConfig(
        max_sequences=options.max_sequences,
        max_draft=options.max_draft,
        max_step_tokens=max(2048, options.max_sequences * (1 + options.max_draft)),
    )
    engine = build_engine(model, config, drafter)
    began = time.perf_counter()
    try:
        completions = _complete(engine, requests, console)
    finally:
        engine.close()
    seconds = time.perf_counter() - began
    _write(prompts, completions, tokenizer, options.output)
    _summarise(completions, seconds, options.drafter, console)


def read_prompts(options: GenerateOptions) -> list[str | list[int]]:
    """Texts or lists of token ids, from arguments, a file, or stdin if nothing else was given."""
    if options.prompts and options.path:
        raise UserError("give prompts either as arguments or with --file, not both")
    if options.prompts:
        return list(options.prompts)
    if options.path is None and sys.stdin.isatty():
        raise UserError("no prompt; give one as an argument, with --file, or on stdin")
    from_stdin = options.path is None or str(options.path) == "-"
    text = sys.stdin.read() if from_stdin else _read_file(options.path or Path("-"))
    if from_stdin:
        prompts: list[str | list[int]] = [text]
    elif options.path is not None and options.path.suffix == ".jsonl":
        prompts = [_prompt_of_line(line, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise UserError(f"{options.path or 'stdin'} holds no prompt")
    return prompts


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}") from None


def _prompt_of_line(line: str, number: int) -> str | list[int]:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"line {number} is no JSON object with a `prompt`") from None
    if isinstance(prompt, str):
        return prompt
    is_ids = isinstance(prompt, list) and all(isinstance(i, int) and 0 <= i < 1 << 32 for i in prompt)
    if not is_ids:
        raise UserError(f"line {number}: `prompt` must be text or a list of token ids")
    return list(prompt)


def _as_tokens(prompt: str | list[int], tokenizer: Tokenizer) -> np.ndarray:
    return tokenizer.encode(prompt) if isinstance(prompt, str) else np.array(prompt, np.uint32)


def _complete(engine: Engine, requests: Sequence[Request], console: Console) -> list[Completion]:
    """Run the requests with a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[tokens]} tokens"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("completing", total=len(requests), tokens=0)
        tokens = 0

        def observe(report: StepReport) -> None:
            nonlocal tokens
            tokens += report.committed
            progress.update(task, advance=len(report.finished), tokens=tokens)

        return engine.generate(requests, observe)


def _write(
    prompts: Sequence[str | list[int]], completions: Sequence[Completion], tokenizer: Tokenizer, output: Path | None
) -> None:
    if output is not None:
        lines = (
            json.dumps(
                {
                    "prompt": prompt,
                    "completion": tokenizer.decode(completion.tokens),
                    "tokens": completion.tokens.tolist(),
                    "finish_reason": completion.finish_reason.value,
                }
            )
            for prompt, completion in zip(prompts, completions, strict=True)
        )
        try:
            output.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as problem:
            raise UserError(f"cannot write {output}: {problem.strerror}") from None
        return
    for prompt, completion in zip(prompts, completions, strict=True):
        shown = prompt if isinstance(prompt, str) else f"<{len(prompt)} token ids>"
        print(f"{shown}{tokenizer.decode(completion.tokens)}")
        if len(prompts) > 1:
            print("-" * 40)


def _summarise(completions: Sequence[Completion], seconds: float, drafter: str, console: Console) -> None:
    tokens = sum(len(completion.tokens) for completion in completions)
    steps = sum(completion.steps for completion in completions)
    drafted = sum(completion.drafted for completion in completions)
    accepted = sum(completion.accepted for completion in completions)
    console.print(
        f"{len(completions)} outputs, {tokens:,} tokens in {seconds:.2f} s: {tokens / seconds:,.0f} tokens/s, "
        f"{tokens / steps:.2f} tokens per step; drafter {drafter}: {drafted:,} drafted, {accepted:,} accepted"
        + (f" ({accepted / drafted:.0%})" if drafted else "")
    )
