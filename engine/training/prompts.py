"""Prompts made of held-out functions: the text before a function, its signature and its docstring."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from engine.training.sources import SourceFile

COUNT = 200
PER_FILE = 8
"""Largest number of prompts per file, so that a few large files do not dominate."""
MIN_BODY_LINES = 4
MIN_TOKENS, MAX_TOKENS = 32, 192
"""Shorter prompts give too little context; longer ones lose their first lines."""


@dataclass(frozen=True)
class FunctionPrompt:
    """One function to complete."""

    source: str
    """File, function and line, such as `json/__init__.py:dumps:183`."""
    prompt: str
    """Ends with the line before the function's first statement."""


def function_prompts(files: Sequence[SourceFile], tokenizer: Tokenizer, seed: int = 0) -> list[FunctionPrompt]:
    """Return `COUNT` different prompts sampled from `files`, in a random order."""
    rng = random.Random(seed)
    chosen: dict[str, FunctionPrompt] = {}
    for file in files:
        of_file = [prompt for prompt in _prompts_of(file, tokenizer) if prompt.prompt not in chosen]
        rng.shuffle(of_file)
        chosen.update((prompt.prompt, prompt) for prompt in of_file[:PER_FILE])
    prompts = list(chosen.values())
    rng.shuffle(prompts)
    return prompts[:COUNT]


def write_prompts(prompts: Sequence[FunctionPrompt], path: Path) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(asdict(prompt)) + "\n" for prompt in prompts), encoding="utf-8")


def _prompts_of(file: SourceFile, tokenizer: Tokenizer) -> Iterator[FunctionPrompt]:
    try:
        tree = ast.parse(file.text)
    except SyntaxError:
        return
    lines = [line + "\n" for line in file.text.split("\n")]
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        has_docstring = ast.get_docstring(node, clean=False) is not None
        first = node.body[0]
        cut = (first.end_lineno or first.lineno) if has_docstring else first.lineno - 1
        if cut < node.lineno or node.end_lineno - cut < MIN_BODY_LINES:
            continue
        prompt = _last_lines(lines[:cut], tokenizer)
        if prompt is not None:
            yield FunctionPrompt(f"{file.path}:{node.name}:{node.lineno}", prompt)


def _last_lines(lines: Sequence[str], tokenizer: Tokenizer) -> str | None:
    """Return the last whole lines of at most `MAX_TOKENS` tokens; None for fewer than `MIN_TOKENS`."""
    kept: list[str] = []
    for line in reversed(lines):
        if len(tokenizer.encode(line + "".join(kept)).ids) > MAX_TOKENS:
            break
        kept.insert(0, line)
    text = "".join(kept).rstrip() + "\n"
    return text if len(tokenizer.encode(text).ids) >= MIN_TOKENS else None
