"""`ssd-engine generate`: prompts in, completions and a summary out."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from engine.commands.launch import launch, load
from engine.commands.options import EngineOptions
from engine.commands.output import CompletionWriter, Prompt
from engine.engine import Engine, StepReport
from engine.models.tokenizer import Tokenizer
from engine.sampling.seeds import sample_seed
from engine.scheduling.request import Completion, Request, SamplingParams
from ssd.errors import UserError

NO_PROMPT = "no prompt; give one as an argument, with --file, or on stdin"


@dataclass(frozen=True)
class GenerateOptions:
    """What the command line asked for; see its help."""

    prompts: tuple[str, ...]
    path: Path | None
    engine: EngineOptions
    sampling: SamplingParams
    """Of the first prompt; each of the others has its own seed, the next one."""
    samples: int
    """Outputs of each prompt, each with a seed made of the prompt's."""
    output: Path | None


def run_generate(options: GenerateOptions) -> None:
    """Read the prompts, check all of them, complete them, and print. Raises UserError before anything runs."""
    prompts = read_prompts(options)
    sampling = options.sampling
    if options.output is None and (sampling.logprobs is not None or sampling.prompt_logprobs is not None):
        raise UserError("log-probabilities are written to --output; name a file, or - for stdout")
    model = load(options.engine)
    tokenizer = Tokenizer(options.engine.model)
    requests = _requests(prompts, tokenizer, options)
    console = Console(stderr=True, highlight=False)
    engine = launch(
        model,
        tokenizer,
        options.engine,
        warn=lambda text: console.print(f"[yellow]warning:[/] {escape(text)}"),
        say=lambda text: console.print(escape(text)),
    )
    with closing(engine):
        for number, request in enumerate(requests[:: options.samples], start=1):
            with _naming_prompt(number):
                engine.check(request)
        with closing(CompletionWriter(prompts, requests, tokenizer, options.output)) as writer:
            began = time.perf_counter()
            completions = _complete(engine, requests, writer, console)
            seconds = time.perf_counter() - began
    _summarise(completions, seconds, options.engine.drafter, console)


def read_prompts(options: GenerateOptions) -> list[Prompt]:
    """Texts or lists of token ids, from arguments, a file, or stdin if nothing else was given."""
    if options.prompts and options.path:
        raise UserError("give prompts either as arguments or with --file, not both")
    if options.prompts:
        return list(options.prompts)
    if options.path is None and sys.stdin.isatty():
        raise UserError(NO_PROMPT)
    from_stdin = options.path is None or str(options.path) == "-"
    text = _read_stdin() if from_stdin else _read_file(options.path or Path("-"))
    # Not `splitlines`, for which form feeds and Unicode's separators end lines too.
    lines = text.removesuffix("\n").split("\n")
    if from_stdin:
        prompts: list[Prompt] = [text] if text else []
    elif options.path is not None and options.path.suffix == ".jsonl":
        prompts = [_prompt_of_line(line, number) for number, line in enumerate(lines, 1) if line.strip()]
    else:
        prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UserError(NO_PROMPT if from_stdin else f"{options.path} holds no prompt")
    return prompts


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as problem:
        raise UserError(f"cannot read stdin: {problem}") from None


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}") from None


def _prompt_of_line(line: str, number: int) -> Prompt:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"line {number} is no JSON object with a `prompt`") from None
    if isinstance(prompt, str):
        return prompt
    is_ids = isinstance(prompt, list) and all(type(i) is int and 0 <= i < 1 << 32 for i in prompt)
    if not is_ids:
        raise UserError(f"line {number}: `prompt` must be text or a list of token ids")
    return list(prompt)


def _requests(prompts: Sequence[Prompt], tokenizer: Tokenizer, options: GenerateOptions) -> list[Request]:
    """A request for each sample of each prompt; prompts have their own seeds, so one given twice is sampled twice."""
    requests = []
    for index, prompt in enumerate(prompts):
        seed = options.sampling.seed + index
        with _naming_prompt(index + 1):
            tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else np.array(prompt, np.uint32)
        requests += [
            Request(tokens, replace(options.sampling, seed=sample_seed(seed, sample)))
            for sample in range(options.samples)
        ]
    return requests


@contextmanager
def _naming_prompt(number: int) -> Iterator[None]:
    """Says which prompt a UserError is about."""
    try:
        yield
    except UserError as problem:
        raise UserError(f"prompt {number}: {problem}") from None


def _complete(
    engine: Engine, requests: Sequence[Request], writer: CompletionWriter, console: Console
) -> list[Completion]:
    """Run the requests with a progress bar; `engine` is new, so its ids are the requests' indices."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[tokens]} tokens"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("completing", total=len(requests), tokens=0)
        tokens = 0

        def observe(report: StepReport) -> None:
            nonlocal tokens
            tokens += report.committed
            writer.take(report.finished)
            progress.update(task, advance=len(report.finished), tokens=tokens)

        return engine.generate(requests, observe)


def _summarise(completions: Sequence[Completion], seconds: float, drafter: str, console: Console) -> None:
    tokens = sum(len(completion.tokens) for completion in completions)
    steps = sum(completion.steps for completion in completions)
    drafted = sum(completion.drafted for completion in completions)
    accepted = sum(completion.accepted for completion in completions)
    console.print(
        f"{_counted(len(completions), 'output')}, {_counted(tokens, 'token')} in {seconds:.2f} s: "
        f"{tokens / seconds:,.0f} tokens/s, "
        f"{tokens / steps:.2f} tokens per step; drafter {drafter}: {drafted:,} drafted, {accepted:,} accepted"
        + (f" ({accepted / drafted:.0%})" if drafted else "")
    )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
