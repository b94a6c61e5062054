"""Files of prompts, as read by commands."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drafter_service.client.chat_template import load_chat_template
from engine.models.tokenizer import ChatPrompts, Tokenizer
from ssd.errors import UserError

FIELDS = ("prompt", "source")
"""Fields of a line of a .jsonl file; `source` may say where a prompt is from, and is not used."""
LINES = 'a prompt on each line, in a .jsonl file as {"prompt": "def main():"}'
"""What a file contains, for error messages."""


@dataclass(frozen=True)
class Prompt:
    """A prompt."""

    content: str | list[int]
    """Text, or token ids."""

    def tokens(self, tokenizer: Tokenizer, chat: ChatPrompts | None = None) -> np.ndarray:
        """Return the token ids, uint32 [n]. chat: formats the text as a message of the user.

        Raises UserError for token ids that would have to be formatted, and for text that cannot be encoded.
        """
        if chat is None:
            text = self.content
            return tokenizer.encode(text) if isinstance(text, str) else np.array(text, np.uint32)
        if not isinstance(self.content, str):
            raise UserError("--chat formats text, not token ids; leave it out, or give text")
        return chat.tokens([{"role": "user", "content": self.content}])


def load_chat(folder: Path, tokenizer: Tokenizer) -> ChatPrompts:
    """Return the chat template of a model. Raises UserError if it has none."""
    if load_chat_template(folder) is None:
        raise UserError(f"--chat: {folder} has no chat template; leave --chat out, or put a chat_template.jinja there")
    return ChatPrompts(folder, tokenizer)


def read_prompt_file(path: Path) -> list[Prompt]:
    """Return the prompts of a file: its lines, or those of the objects in a .jsonl file. Raises UserError."""
    # `splitlines` would also split at form feeds and Unicode separators.
    lines = _read_file(path).removesuffix("\n").split("\n")
    if path.suffix == ".jsonl":
        try:
            prompts = [_prompt_of_line(line, number) for number, line in enumerate(lines, 1) if line.strip()]
        except UserError as problem:
            raise UserError(f"{path}, {problem}") from None
    else:
        prompts = [Prompt(line) for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"{path} has no prompt; write {LINES}")
    return prompts


def read_texts(path: Path) -> list[str]:
    """Return the prompts of a file, all of which are text. Raises UserError."""
    texts = [prompt.content for prompt in read_prompt_file(path)]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise UserError(f"{path} has a prompt that is empty or not text")
    return [str(text) for text in texts]


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise UserError(f"{path} is not text in UTF-8: {problem}") from None
    except OSError as problem:
        raise UserError(f"cannot read {path}: {problem.strerror}") from None


def _prompt_of_line(line: str, number: int) -> Prompt:
    try:
        record = json.loads(line)
        content = record["prompt"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"line {number} is not a JSON object with a `prompt`") from None
    is_ids = isinstance(content, list) and all(type(i) is int and 0 <= i < 1 << 32 for i in content)
    if not (is_ids or isinstance(content, str)):
        raise UserError(f"line {number}: `prompt` must be text or a list of token ids")
    if unknown := record.keys() - set(FIELDS):
        raise UserError(f"line {number}: there is no field `{min(unknown)}`; give {', '.join(FIELDS)}")
    return Prompt(content)
