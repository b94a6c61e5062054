"""Token ids in files of numpy, read as a stream.

Each row of a 2-D array is a document. An .npz file has `tokens`, and may have `offsets` [D + 1], or `prompt_len` and
`output_len` [D]. Longer documents are split into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from drafter_service.ingest.answers import token_ids
from drafter_service.ingest.documents import NO_TOKENS, Item, RecordError
from drafter_service.ingest.files import Opened
from drafter_service.ingest.reading import Reading

PIECE_TOKENS = 1 << 16
LENGTHS = ("offsets", "prompt_len", "output_len")
NO_ARRAY = "no array `tokens` of integers with one or two dimensions"
BAD_LENGTHS = "lengths of documents that do not match the tokens"
CUT_OFF = "fewer tokens than the header says"

Lengths = Iterable[tuple[int, int]]
"""Number of tokens of the prompt and of the output, for each document."""


def read_npy(opened: Opened, reading: Reading) -> Iterator[Item]:
    """Yield the documents of an .npy file. Raises RecordError for other contents."""
    return _read(opened, opened.data, {}, reading)


def read_npz(opened: Opened, reading: Reading) -> Iterator[Item]:
    """Yield the documents of an .npz file, like `read_npy`."""
    with np.load(opened.seekable()) as archive:
        if "tokens" not in archive:
            raise RecordError(NO_ARRAY)
        arrays = {name: archive[name] for name in LENGTHS if name in archive}
        with archive.zip.open("tokens.npy") as stream:
            yield from _read(opened, stream, arrays, reading)


def _read(opened: Opened, stream: BinaryIO, arrays: Mapping[str, np.ndarray], reading: Reading) -> Iterator[Item]:
    """Yield the documents in an array; `arrays` may have their lengths, by the names in `LENGTHS`."""
    shape, dtype = _header(stream)
    for number, (prompt, output) in enumerate(_in_pieces(_lengths(arrays, shape)), 1):
        data = stream.read((prompt + output) * dtype.itemsize)
        values = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)
        opened.advance()
        place = f"{opened.label}:{number}"
        try:
            tokens = token_ids(values)
            if len(tokens) <= prompt:
                raise RecordError(NO_TOKENS)
            # A copy, which does not keep the prompt in memory.
            yield Item(place, reading.prefix_of(tokens[:prompt]) if prompt else None, tokens[prompt:].copy())
        except RecordError as problem:
            reading.faults.record(str(problem), place)
        if len(values) < prompt + output:
            raise RecordError(CUT_OFF)


def _header(stream: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, is_by_columns, dtype = read(stream)
    if dtype.kind not in "iu" or len(shape) not in (1, 2) or (is_by_columns and len(shape) == 2):
        raise RecordError(NO_ARRAY)
    return shape, dtype


def _lengths(arrays: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> Lengths:
    if len(shape) == 2:
        return repeat((0, shape[1]), shape[0])
    if "offsets" not in arrays and len(arrays) < 2:
        return [(0, shape[0])]
    if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in arrays.values()):
        raise RecordError(BAD_LENGTHS)
    offsets, prompts, outputs = (arrays.get(name, np.empty(0)).astype(np.int64) for name in LENGTHS)
    if "offsets" in arrays:
        outputs = np.diff(offsets)
        prompts = np.zeros_like(outputs)
    is_consistent = len(prompts) == len(outputs) and (prompts >= 0).all() and (outputs >= 0).all()
    if not is_consistent or offsets[:1].any() or int(prompts.sum() + outputs.sum()) != shape[0]:
        raise RecordError(BAD_LENGTHS)
    return zip(prompts.tolist(), outputs.tolist(), strict=True)


def _in_pieces(lengths: Lengths) -> Lengths:
    for prompt, output in lengths:
        while prompt == 0 and output > PIECE_TOKENS:
            yield 0, PIECE_TOKENS
            output -= PIECE_TOKENS
        yield prompt, output
