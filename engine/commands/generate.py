"""`ssd-engine generate`: complete prompts and print a summary."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape

from engine.api.outputs import OutputText, Piece
from engine.commands.launch import launch, load
from engine.commands.options import EngineOptions, GenerateFlags
from engine.commands.progress import Interruption, LongProgress, deferred_interruption
from engine.commands.prompts import Prompt, load_chat, read_prompt_file
from engine.engine import Engine
from engine.models.tokenizer import Detokenizer, Tokenizer
from engine.scheduling.draft_usage import draft_usage
from engine.scheduling.report import StepReport
from engine.scheduling.request import Completion, Request, SamplingParams
from ssd.errors import UserError

NO_PROMPT = "no prompt; give one as an argument, with --file, or on stdin"
NOT_DRAFTED = (
    "note: no draft token was verified: the drafter proposed none, or verifying them would have taken longer than "
    "decoding without drafts"
)


def run_generate(
    texts: Sequence[str], options: GenerateFlags, engine_options: EngineOptions, sampling: SamplingParams
) -> None:
    """Read the prompts, check all of them, complete them, and write the outputs. Raises UserError.

    texts: prompts. sampling: parameters of the first one; each further prompt has the next seed.
    """
    prompts = read_prompts(texts, options.path)
    tokenizer = Tokenizer(engine_options.folder)
    requests = _requests(prompts, tokenizer, options, engine_options, sampling)
    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {escape(engine_options.folder.name)} ..."):
        engine = launch(
            load(engine_options),
            tokenizer,
            engine_options,
            warn=lambda text: console.print(f"[yellow]warning:[/] {escape(text)}"),
            notify=lambda text: console.print(escape(text)),
        )
    with closing(engine):
        for number, request in enumerate(requests, start=1):
            with _prefix_errors(number):
                longest = engine.check(request)
            room, wanted = longest - len(request.prompt), request.sampling.max_tokens
            if room < wanted:
                console.print(f"[yellow]note:[/] prompt {number} leaves room for {room:,} of {wanted:,} tokens")
        with (
            closing(CompletionWriter(prompts, requests, tokenizer, options)) as writer,
            deferred_interruption() as interruption,
        ):
            began = time.perf_counter()
            completions = _complete(engine, requests, writer, console, interruption)
            seconds = time.perf_counter() - began
    _print_summary(completions, seconds, engine_options.drafter, console)
    interruption.raise_if_interrupted()


def read_prompts(texts: Sequence[str], path: Path | None) -> list[Prompt]:
    """Return texts or lists of token ids from arguments, a file, or stdin if neither was given. Raises UserError."""
    if texts and path:
        raise UserError("give prompts either as arguments or with --file, not both")
    if texts:
        return [Prompt(text) for text in texts]
    if path is None and sys.stdin.isatty():
        raise UserError(NO_PROMPT)
    if path is not None and str(path) != "-":
        return read_prompt_file(path)
    text = _read_stdin()
    if not text:
        raise UserError(NO_PROMPT)
    return [Prompt(text)]


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as problem:
        raise UserError(f"cannot read stdin: {problem}") from None


def _requests(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    options: GenerateFlags,
    engine: EngineOptions,
    sampling: SamplingParams,
) -> list[Request]:
    """Return a request for each prompt. Repeated prompts have different seeds."""
    requests = []
    chat = load_chat(engine.folder, tokenizer) if options.chat else None
    for index, prompt in enumerate(prompts):
        with _prefix_errors(index + 1):
            request = Request(prompt.tokens(tokenizer, chat), replace(sampling, seed=sampling.seed + index))
        requests.append(request)
    return requests


@contextmanager
def _prefix_errors(number: int) -> Iterator[None]:
    """Add the number of the prompt to a UserError."""
    try:
        yield
    except UserError as problem:
        raise UserError(f"prompt {number}: {problem}") from None


def _complete(
    engine: Engine, requests: Sequence[Request], writer: CompletionWriter, console: Console, interruption: Interruption
) -> list[Completion]:
    """Run the requests; the engine is new, so that its ids are the indices of the requests.

    Shows a progress bar unless the writer shows the output itself. An interruption ends all requests.
    """
    with nullcontext() if writer.is_streaming else LongProgress(console, len(requests), transient=True) as progress:
        tokens = 0

        def observe(report: StepReport) -> None:
            nonlocal tokens
            tokens += report.committed
            writer.observe(report)
            if progress is not None:
                progress.advance(len(report.finished), _count(tokens, "token"))
            if interruption.signal is not None:
                ended = {index: engine.cancel(index) for index in range(len(requests))}
                writer.add({index: each for index, each in ended.items() if each is not None and len(each.tokens)})

        return engine.generate(requests, observe)


def _print_summary(completions: Sequence[Completion], seconds: float, drafter: str, console: Console) -> None:
    tokens, draft = sum(len(completion.tokens) for completion in completions), draft_usage(completions)
    console.print(
        f"{_count(len(completions), 'output')}, {_count(tokens, 'token')} in {seconds:.2f} s: "
        f"{tokens / seconds:,.0f} tokens/s, "
        f"{tokens / max(1, draft['steps']):.2f} tokens per step; drafter {drafter}: {_acceptance(draft)}"
    )
    # Nothing can be drafted for outputs of one token.
    if not draft["drafted_tokens"] and drafter != "none" and tokens > len(completions):
        console.print(NOT_DRAFTED)
    if len(sources := draft["by_source"]) > 1:
        console.print("by source: " + "; ".join(f"{name}: {_acceptance(each)}" for name, each in sources.items()))


def _acceptance(counts: Mapping[str, Any]) -> str:
    drafted, accepted = counts["drafted_tokens"], counts["accepted_tokens"]
    return f"{drafted:,} drafted, {accepted:,} accepted" + (f" ({accepted / drafted:.0%})" if drafted else "")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class CompletionWriter:
    """Writes completions: JSON lines to a file in prompt order as they finish, or text to stdout.

    Text is written at the end; only that of a single request is written while it is produced.
    """

    def __init__(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], tokenizer: Tokenizer, options: GenerateFlags
    ) -> None:
        """`requests`: those of the prompts, in their order. Raises UserError if the file cannot be written."""
        self._prompts = prompts
        self._requests = requests
        self._tokenizer = tokenizer
        self._path = options.out
        self._shows_prompts = not options.chat
        self._waiting: dict[int, Completion] = {}
        self._next = 0
        self._stream: OutputText | None = None
        """Text of the only request, if it is written as it is produced."""
        self._streamed = 0
        """Number of tokens in `_stream` so far."""
        try:
            self._file = None if self._path is None else _open(self._path)
        except OSError as problem:
            raise self._write_error(problem) from None
        if self._file is None and len(requests) == 1:
            self._stream = OutputText(Detokenizer(tokenizer.decode, requests[0].prompt), requests[0].sampling.stop)
            self._print(self._prompt(0))

    @property
    def is_streaming(self) -> bool:
        """Whether text is written as it is produced."""
        return self._stream is not None

    def observe(self, report: StepReport) -> None:
        """Write what a step produced."""
        for sequence_id, tokens, accepted in report.arrays.each():
            if self._stream is not None and sequence_id not in report.finished:
                self._streamed += len(tokens)
                self._print_pieces(self._stream.feed(tokens, accepted))
        self.add(report.finished)

    def add(self, finished: Mapping[int, Completion]) -> None:
        """Add completions by request index; write those to the file whose predecessors have all finished."""
        self._waiting.update(finished)
        while self._file is not None and self._next in self._waiting:
            self._write_line(self._file, self._next)
            self._next += 1

    def close(self) -> None:
        """Write the remaining completions; after an interruption, only those that have any output."""
        for index in sorted(self._waiting):
            if self._file is not None:
                self._write_line(self._file, index)
            elif self._stream is not None:
                completion = self._waiting[index]
                self._print_pieces(self._stream.feed(completion.content[self._streamed :], 0))
                self._print_pieces(self._stream.finish(completion.text))
            else:
                self._print(f"{self._prompt(index)}{self._text(index)}\n{'-' * 40}\n")
        if self._stream is not None:
            self._print("\n")
        if self._file is not None and self._file is not sys.stdout:
            self._file.close()

    def _write_line(self, file: TextIO, index: int) -> None:
        completion = self._waiting[index]
        line = {
            "index": index,
            "prompt": self._prompts[index].content,
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

    def _print(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _print_pieces(self, pieces: Sequence[Piece]) -> None:
        self._print("".join(piece.text for piece in pieces))

    def _prompt(self, index: int) -> str:
        """Return what is shown before the output of a request."""
        prompt = self._prompts[index].content
        if not self._shows_prompts:
            return ""
        return prompt if isinstance(prompt, str) else f"<{len(prompt)} token ids>"

    def _text(self, index: int) -> str:
        completion = self._waiting[index]
        if completion.text is not None:
            return completion.text
        return self._tokenizer.decode_behind(self._requests[index].prompt, completion.content)

    def _write_error(self, problem: OSError) -> UserError:
        return UserError(f"cannot write {self._path}: {problem.strerror}")


def _open(path: Path) -> TextIO:
    """Open a file of outputs, or stdout for "-". A new file is readable by its owner only. Raises OSError."""
    if str(path) == "-":
        return sys.stdout
    return open(path, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600))
