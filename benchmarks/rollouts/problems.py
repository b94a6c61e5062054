"""Settings of a run, and its problems: functions of the standard library to complete, and a reward that is computed."""

from __future__ import annotations

import ast
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

from engine.models.shipped import PROMPTS_FILE, SHIPPED_MODEL

STATEMENTS = 8
"""Number of different statements from which on a body counts as complete; the policy would otherwise learn to write
bodies of one line, and rollouts would become too short to measure."""
NEXT_DEFINITION = ("def ", "class ", "@", "if __name__")
"""Beginnings of lines that follow a function."""


@dataclass(frozen=True)
class Settings:
    """Everything that determines what a run computes, apart from the drafter."""

    problems: int = 16
    """Number of problems, each of which has a group of samples in every training step."""
    samples: int = 8
    """Number of samples in a group."""
    prompt_tokens: int = 96
    """Largest number of prompt tokens; longer prompts are truncated at the start."""
    max_tokens: int = 128
    """Largest number of tokens of an output."""
    learning_rate: float = 5e-4
    """Constant. The mean reward of step 14 was 0.24 with 2e-4, 0.32 with 3e-4 and 0.35 with 5e-4."""
    seed: int = 0
    max_sequences: int = 64
    """Number of sequences that run at the same time, on all engines together. Without drafts, 16, 32 and 128 were not
    faster."""
    engines: int = 1
    """1: the engine is in the trainer's process. More: each has a process of its own, with its share of the threads."""
    threads: int = 2
    """PyTorch's threads of the trainer and of all engines together. Fixed, because sums of floats depend on it."""

    def __post_init__(self) -> None:
        """Raise ValueError for fewer threads than engines."""
        if self.threads < self.engines:
            raise ValueError(f"{self.engines} engines need at least as many threads, not {self.threads}")


@dataclass(frozen=True)
class Problem:
    """A function whose body is to be written."""

    group: str
    """File, name and line of the function. It identifies the samples of this problem."""
    prompt: str
    """Text before the body."""
    head: str
    """The prompt's last lines, from the function's `def` on."""
    arguments: tuple[str, ...]
    """Names of the function's arguments without `self` and `cls`; at least one."""

    @property
    def indentation(self) -> str:
        """White space before `def`."""
        return self.head[: len(self.head) - len(self.head.lstrip())]

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that begin another definition of the same or of the outermost level; an output ends before them."""
        return tuple(f"\n{space}{words}" for space in sorted({self.indentation, ""}) for words in NEXT_DEFINITION)

    def reward(self, output: str, *, is_complete: bool) -> float:
        """Return the reward of an output, 0 to 1.

        is_complete: whether the output ended before the limit on its length; otherwise its last line is left out. Text
        after the function is left out too. The reward is 0 if the function is not valid Python. Otherwise it is the
        product of the number of different statements divided by `STATEMENTS`, at most 1, and of the mean of two
        numbers: the share of the arguments that the body uses, and 1 if the body ended, else 0.
        """
        body, has_ended = self._body(output, is_complete)
        function = _parsed(self.head + body)
        if function is None:
            return 0.0
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        statements = {ast.dump(node) for node in ast.walk(function) if isinstance(node, ast.stmt) and node != function}
        used = sum(name in names for name in self.arguments) / len(self.arguments)
        return min(1.0, len(statements) / STATEMENTS) * (used + has_ended) / 2

    def _body(self, output: str, is_complete: bool) -> tuple[str, bool]:
        """Return the lines of an output that belong to the function, and whether the function ends in it."""
        lines = output.split("\n")
        for number, line in enumerate(lines):
            text = line.lstrip()
            if text and len(line) - len(text) <= len(self.indentation) and not text.startswith(")"):
                return "\n".join(lines[:number]) + "\n", True
        return "\n".join(lines if is_complete else lines[:-1]) + "\n", is_complete


def read_problems(count: int) -> list[Problem]:
    """Return the first `count` functions with arguments among the shipped model's prompts, which are held-out text.

    Raises ValueError if there are fewer.
    """
    lines = Path(SHIPPED_MODEL / PROMPTS_FILE).read_text(encoding="utf-8").splitlines()
    found = [problem for line in lines if (problem := _problem(json.loads(line))) is not None]
    if len(found) < count:
        raise ValueError(f"there are {len(found)} problems, not {count}")
    return found[:count]


def _problem(record: dict[str, str]) -> Problem | None:
    lines = record["prompt"].splitlines(keepends=True)
    starts = [number for number, line in enumerate(lines) if line.lstrip().startswith("def ")]
    if not starts:
        return None
    head = "".join(lines[starts[-1] :])
    indentation = head[: len(head) - len(head.lstrip())]
    function = _parsed(f"{head}{indentation}    pass\n")
    if function is None:
        return None
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    names = tuple(each.arg for each in arguments if each.arg not in ("self", "cls"))
    return Problem(record["source"], record["prompt"], head, names) if names else None


def _parsed(text: str) -> ast.FunctionDef | None:
    """Return the function that a text consists of, None if it is anything else."""
    try:
        nodes = ast.parse(textwrap.dedent(text)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return nodes[0] if len(nodes) == 1 and isinstance(nodes[0], ast.FunctionDef) else None
