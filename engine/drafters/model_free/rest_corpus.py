"""Read the corpus of the drafter `rest` from a file: a snapshot, token ids, records, or text.

Formats by the end of the file's name: `.npy` and `.npz` (token ids), `.jsonl` (records); other files are snapshots if
they begin as such, otherwise text. `ssd-drafter warm --snapshot` makes snapshots of many more formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np

from engine.models.tokenizer import Tokenizer
from engine.scheduling.plan import NO_TOKENS
from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.ring import MAX_TOKEN_ID, SEPARATOR
from ssd.corpus.sections import MAGIC, read_sections
from ssd.errors import UserError

MIN_CAPACITY = 4096
"""Smallest capacity of a corpus, in tokens."""
PIECE_CHARACTERS = 1 << 20
"""Text is tokenized in pieces of about this length, which end with a line."""

Part = str | np.ndarray
"""Text, or token ids, uint32 [n]."""


class Document(NamedTuple):
    """One request of the corpus."""

    prompt: Part
    """Only its last tokens are remembered."""
    output: Part


def check_corpus(path: Path, vocab_size: int) -> None:
    """Raise UserError for a file that `load_corpus` cannot use; text is not tokenized."""
    if _is_snapshot(path):
        _check_ids(read_sections(path)["text"], vocab_size, path)
    else:
        _read_documents(path, vocab_size)


def load_corpus(path: Path, vocab_size: int, folder: Path | None, config: DrafterConfig) -> Corpus:
    """Return a corpus with the contents of a file, all of them indexed.

    vocab_size: of the target. folder: the target's, whose tokenizer is needed for text. config: `capacity` limits the
    corpus to the newest tokens, `learned_prompt_tokens` is the number of last prompt tokens that are remembered with an
    output. Raises UserError for a file that cannot be used.
    """
    if _is_snapshot(path):
        _check_ids(read_sections(path)["text"], vocab_size, path)
        return snapshot.load(path).corpus
    requests = list(_requests(_read_documents(path, vocab_size), folder, config.learned_prompt_tokens))
    needed = sum(len(tokens) + 1 for tokens in requests)  # with a separator each
    corpus = Corpus(max(MIN_CAPACITY, min(needed, config.capacity)), config.match_depth)
    for tokens in requests:
        corpus.append(tokens)
    corpus.refresh()
    while corpus.is_merging:
        corpus.refresh()
    return corpus


def _requests(documents: Sequence[Document], folder: Path | None, prompt_tokens: int) -> Iterator[np.ndarray]:
    """Yield the tokens of each document: the last ones of its prompt, and its output."""
    tokenizer: Tokenizer | None = None
    for document in documents:
        if any(isinstance(part, str) and part for part in document) and tokenizer is None:
            if folder is None:
                raise UserError("text needs the target's tokenizer; give a corpus of token ids")
            tokenizer = Tokenizer(folder)
        prompt, output = (part if isinstance(part, np.ndarray) else _encode(part, tokenizer) for part in document)
        yield np.concatenate((prompt[max(0, len(prompt) - prompt_tokens) :], output))


def _encode(text: str, tokenizer: Tokenizer | None) -> np.ndarray:
    return NO_TOKENS if tokenizer is None or not text else tokenizer.encode(text, add_special_tokens=False)


def _is_snapshot(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as problem:
        raise UserError(f"cannot read {path}: {problem.strerror}; give the file of a corpus as path") from None


def _check_ids(tokens: np.ndarray, vocab_size: int, path: Path) -> None:
    """Raise UserError for ids that the target does not have; tokens: uint32 [N], separators are ignored."""
    largest = int(tokens[tokens != SEPARATOR].max(initial=0))
    if largest >= vocab_size:
        raise UserError(
            f"{path} holds the token id {largest}, but the target's vocabulary ends at {vocab_size - 1}; "
            "make it again with the target's tokenizer"
        )


def _read_documents(path: Path, vocab_size: int) -> list[Document]:
    """Return the documents of a file that is not a snapshot. Raises UserError if it cannot be used."""
    read = {".npy": _read_array, ".npz": _read_arrays, ".jsonl": _read_lines}.get(path.suffix, _read_text)
    try:
        documents = [document for document in read(path) if len(document.output)]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as problem:
        raise UserError(f"cannot read {path} ({problem}); docs/drafters.md lists the formats of a corpus") from None
    if not documents:
        raise UserError(f"{path} has no text and no tokens; give another file as path")
    for document in documents:
        for part in document:
            if isinstance(part, np.ndarray):
                _check_ids(part, vocab_size, path)
    return documents


def _read_text(path: Path) -> Iterator[Document]:
    piece: list[str] = []
    size = 0
    with path.open(encoding="utf-8") as file:
        for line in file:
            piece.append(line)
            size += len(line)
            if size >= PIECE_CHARACTERS:
                yield Document("", "".join(piece))
                piece, size = [], 0
    yield Document("", "".join(piece))


def _read_lines(path: Path) -> Iterator[Document]:
    """Yield the documents of records as `ssd-engine generate --output` writes them, or with a `text`."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            record = json.loads(line)
            names = [name for name in ("tokens", "completion", "text") if name in record]
            if not names:
                raise ValueError(f"line {number} has none of the fields tokens, completion and text")
            yield Document(_part(record.get("prompt", ""), number), _part(record[names[0]], number))


def _part(value: object, number: int) -> Part:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError(f"line {number}: a prompt or output is neither text nor a list of token ids")
    return _ids(np.array(value, np.int64))


def _read_array(path: Path) -> Iterator[Document]:
    """Yield each row of an array of token ids."""
    yield from _rows(_ids(np.load(path, allow_pickle=False)))


def _read_arrays(path: Path) -> Iterator[Document]:
    """Yield the documents of `tokens`, divided by `offsets`, or by `prompt_len` and `output_len`, if there are any."""
    with np.load(path, allow_pickle=False) as file:
        tokens = _ids(file["tokens"])
        if "offsets" in file:
            outputs = np.diff(file["offsets"].astype(np.int64))
            prompts = np.zeros_like(outputs)
        elif "prompt_len" in file:
            prompts, outputs = file["prompt_len"].astype(np.int64), file["output_len"].astype(np.int64)
        else:
            yield from _rows(tokens)
            return
    lengths = np.stack((prompts, outputs), axis=1).ravel()
    if (lengths < 0).any() or lengths.sum() != tokens.size:
        raise ValueError("the lengths of documents do not match its tokens")
    parts = np.split(tokens.ravel(), np.cumsum(lengths)[:-1])
    yield from (Document(prompt, output) for prompt, output in zip(parts[::2], parts[1::2], strict=True))


def _rows(tokens: np.ndarray) -> Iterator[Document]:
    yield from (Document("", row) for row in np.atleast_2d(tokens))


def _ids(array: np.ndarray) -> np.ndarray:
    """Return token ids as uint32, of the same shape."""
    is_integer = array.dtype.kind in "iu" and array.ndim in (1, 2)
    if not is_integer or (array.size and not 0 <= array.min() <= array.max() <= MAX_TOKEN_ID):
        raise ValueError("it has no array of token ids")
    return array.astype(np.uint32)
