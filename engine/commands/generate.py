"""`ssd-engine generate`: complete prompts and print a summary."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.markup import escape

from engine.commands.launch import launch, load
from engine.commands.options import EngineOptions
from engine.commands.progress import LongProgress
from engine.commands.prompts import Prompt, read_prompt_file
from engine.drafters.sources import DraftCounts, sum_by_name
from engine.engine import Engine, StepReport
from engine.models.tokenizer import Tokenizer
from engine.sampling.seeds import sample_seed
from engine.scheduling.draft_usage import draft_usage
from engine.scheduling.request import Completion, Request, SamplingParams
from ssd.errors import UserError

NO_PROMPT = "no prompt; give one as an argument, with --file, or on stdin"


NOT_DRAFTED = (
    "note: no draft token was verified: the drafter proposed none, or verifying them would have taken longer than "
    "decoding without drafts"
)


@dataclass(frozen=True)
class GenerateOptions:
    """Arguments of the command line; see its help."""

    prompts: tuple[str, ...]
    path: Path | None
    engine: EngineOptions
    sampling: SamplingParams
    """Parameters of the first prompt; each further prompt has the next seed."""
    samples: int
    """Outputs per prompt, each with a seed derived from the prompt's."""
    out: Path | None
    adapter: str | None = None
    """Adapter of prompts that name none."""


def run_generate(options: GenerateOptions) -> None:
    """Read the prompts, check all of them, complete them, and write the outputs. Raises UserError."""
    prompts = read_prompts(options)
    tokenizer = Tokenizer(options.engine.model)
    requests = _requests(prompts, tokenizer, options)
    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {escape(options.engine.model.name)} ..."):
        engine = launch(
            load(options.engine),
            tokenizer,
            options.engine,
            warn=lambda text: console.print(f"[yellow]warning:[/] {escape(text)}"),
            notify=lambda text: console.print(escape(text)),
        )
    with closing(engine):
        for number, request in enumerate(requests[:: options.samples], start=1):
            with _prefix_errors(number):
                longest = engine.check(request)
            room, wanted = longest - len(request.prompt), request.sampling.max_tokens
            if room < wanted:
                console.print(f"[yellow]note:[/] prompt {number} leaves room for {room:,} of {wanted:,} tokens")
        with closing(CompletionWriter(prompts, requests, tokenizer, options.out)) as writer:
            began = time.perf_counter()
            completions = _complete(engine, requests, writer, console)
            seconds = time.perf_counter() - began
    _print_summary(completions, seconds, options.engine.drafter, console)


def read_prompts(options: GenerateOptions) -> list[Prompt]:
    """Return texts or lists of token ids from arguments, a file, or stdin if neither was given. Raises UserError."""
    if options.prompts and options.path:
        raise UserError("give prompts either as arguments or with --file, not both")
    if options.prompts:
        return [Prompt(text) for text in options.prompts]
    if options.path is None and sys.stdin.isatty():
        raise UserError(NO_PROMPT)
    if options.path is not None and str(options.path) != "-":
        return read_prompt_file(options.path)
    text = _read_stdin()
    if not text:
        raise UserError(NO_PROMPT)
    return [Prompt(text)]


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as problem:
        raise UserError(f"cannot read stdin: {problem}") from None


def _requests(prompts: Sequence[Prompt], tokenizer: Tokenizer, options: GenerateOptions) -> list[Request]:
    """Return a request per sample of each prompt. Repeated prompts have different seeds."""
    requests = []
    for index, prompt in enumerate(prompts):
        seed = options.sampling.seed + index
        with _prefix_errors(index + 1):
            request = Request(prompt.tokens(tokenizer), options.sampling, adapter=prompt.adapter or options.adapter)
            request.check_adapter(options.engine.loras)
        requests += [
            replace(request, sampling=replace(request.sampling, seed=sample_seed(seed, sample)))
            for sample in range(options.samples)
        ]
    return requests


@contextmanager
def _prefix_errors(number: int) -> Iterator[None]:
    """Add the number of the prompt to a UserError."""
    try:
        yield
    except UserError as problem:
        raise UserError(f"prompt {number}: {problem}") from None


def _complete(
    engine: Engine, requests: Sequence[Request], writer: CompletionWriter, console: Console
) -> list[Completion]:
    """Run the requests with a progress bar. The engine is new, so that its ids are the indices of the requests."""
    with LongProgress(console, len(requests), transient=True) as progress:
        tokens = 0

        def observe(report: StepReport) -> None:
            nonlocal tokens
            tokens += report.committed
            writer.add(report.finished)
            progress.advance(len(report.finished), _count(tokens, "token"))

        return engine.generate(requests, observe)


def _print_summary(completions: Sequence[Completion], seconds: float, drafter: str, console: Console) -> None:
    tokens = sum(len(completion.tokens) for completion in completions)
    steps = sum(completion.steps for completion in completions)
    drafted = sum(completion.drafted for completion in completions)
    accepted = sum(completion.accepted for completion in completions)
    by_source = sum_by_name(completion.by_source for completion in completions)
    console.print(
        f"{_count(len(completions), 'output')}, {_count(tokens, 'token')} in {seconds:.2f} s: "
        f"{tokens / seconds:,.0f} tokens/s, "
        f"{tokens / steps:.2f} tokens per step; drafter {drafter}: {_acceptance(DraftCounts(drafted, accepted))}"
    )
    # Nothing can be drafted for outputs of one token.
    if not drafted and drafter != "none" and tokens > len(completions):
        console.print(NOT_DRAFTED)
    if len(by_source) > 1:
        console.print("by source: " + "; ".join(f"{name}: {_acceptance(each)}" for name, each in by_source.items()))


def _acceptance(counts: DraftCounts) -> str:
    share = f" ({counts.accepted / counts.drafted:.0%})" if counts.drafted else ""
    return f"{counts.drafted:,} drafted, {counts.accepted:,} accepted{share}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class CompletionWriter:
    """Writes completions in prompt order: JSON lines to a file as they finish, or text to stdout at the end."""

    def __init__(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], tokenizer: Tokenizer, path: Path | None
    ) -> None:
        """`requests`: the same number per prompt, in their order. Raises UserError if `path` cannot be written."""
        self._prompts = prompts
        self._requests = requests
        self._samples = len(requests) // len(prompts)
        self._tokenizer = tokenizer
        self._path = path
        self._waiting: dict[int, Completion] = {}
        self._next = 0
        try:
            self._file = None if path is None else _open(path)
        except OSError as problem:
            raise self._write_error(problem) from None

    def add(self, finished: Mapping[int, Completion]) -> None:
        """Add completions by request index; write those to the file whose predecessors have all finished."""
        self._waiting.update(finished)
        while self._file is not None and self._next in self._waiting:
            self._write_line(self._file, self._next)
            self._next += 1

    def close(self) -> None:
        """Write the remaining completions; after an interruption, only those that have finished."""
        for index in sorted(self._waiting):
            if self._file is not None:
                self._write_line(self._file, index)
            else:
                self._print(index)
        if self._file is not None and self._file is not sys.stdout:
            self._file.close()

    def _write_line(self, file: TextIO, index: int) -> None:
        completion = self._waiting[index]
        prompt, sample = divmod(index, self._samples)
        line = {
            "index": prompt,
            "sample": sample,
            "prompt": self._prompts[prompt].content,
            "completion": self._text(index),
            "tokens": completion.tokens.tolist(),
            "finish_reason": completion.finish_reason.value,
            "stop_reason": completion.stop_reason,
            "draft": draft_usage([completion]),
        }
        try:
            file.write(json.dumps(line) + "\n")
            file.flush()
        except OSError as problem:
            # `close` must not try to write again.
            self._waiting.clear()
            self._file = None
            raise self._write_error(problem) from None
        del self._waiting[index]

    def _print(self, index: int) -> None:
        prompt = self._prompts[index // self._samples].content
        shown = prompt if isinstance(prompt, str) else f"<{len(prompt)} token ids>"
        sys.stdout.write(f"{shown}{self._text(index)}\n")
        if len(self._requests) > 1:
            sys.stdout.write("-" * 40 + "\n")

    def _text(self, index: int) -> str:
        completion = self._waiting[index]
        if completion.text is not None:
            return completion.text
        return self._tokenizer.decode_behind(self._requests[index].prompt, completion.content)

    def _write_error(self, problem: OSError) -> UserError:
        return UserError(f"cannot write {self._path}: {problem.strerror}")


def _open(path: Path) -> TextIO:
    return sys.stdout if str(path) == "-" else path.open("w", encoding="utf-8")
