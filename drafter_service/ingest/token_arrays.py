"""Token ids in files of numpy, read as a stream.

Each row of a 2-D array is a document. An .npz file has `tokens`, and may have `offsets` [D + 1], or `prompt_len` and
`output_len` [D]. Longer documents are split into pieces.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.lib import format as npy

from drafter_service.ingest.answers import token_ids
from drafter_service.ingest.documents import NO_TOKENS, Chunk, Item, RecordError
from drafter_service.ingest.files import Opened
from drafter_service.ingest.reading import Reading

PIECE_TOKENS = 1 << 16
TOKENS, OFFSETS, PROMPTS, OUTPUTS = (f"{name}.npy" for name in ("tokens", "offsets", "prompt_len", "output_len"))
NO_ARRAY = "no array `tokens` of integers with one or two dimensions"
BAD_LENGTHS = "lengths of documents that do not match the tokens"
CUT_OFF = "fewer tokens than the header says"

Lengths = Iterable[tuple[int, int]]
"""Number of tokens of the prompt and of the output, for each document."""


def read_npy(opened: Opened, reading: Reading) -> Iterator[Chunk]:
    """Yield chunks of an .npy file. Raises RecordError for other contents."""
    stream = opened.data
    shape, dtype = _header(stream)
    yield from _read(opened, stream, dtype, _rows(shape), reading)


def read_npz(opened: Opened, reading: Reading) -> Iterator[Chunk]:
    """Yield chunks of an .npz file, like `read_npy`."""
    with zipfile.ZipFile(opened.seekable()) as archive:
        names = set(archive.namelist())
        if TOKENS not in names:
            raise RecordError(NO_ARRAY)
        with archive.open(TOKENS) as member:
            stream = cast(BinaryIO, member)
            shape, dtype = _header(stream)
            has_lengths = len(shape) == 1 and (OFFSETS in names or {PROMPTS, OUTPUTS} <= names)
            lengths = _lengths(archive, names, shape[0]) if has_lengths else _rows(shape)
            yield from _read(opened, stream, dtype, lengths, reading)


def _header(stream: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, is_by_columns, dtype = read(stream)
    if dtype.kind not in "iu" or len(shape) not in (1, 2) or (is_by_columns and len(shape) == 2):
        raise RecordError(NO_ARRAY)
    return shape, dtype


def _rows(shape: tuple[int, ...]) -> Lengths:
    return repeat((0, shape[1]), shape[0]) if len(shape) == 2 else [(0, shape[0])]


def _lengths(archive: zipfile.ZipFile, names: set[str], tokens: int) -> Lengths:
    if OFFSETS in names:
        offsets = _integers(archive, OFFSETS)
        if offsets[:1].any():
            raise RecordError(BAD_LENGTHS)
        outputs = np.diff(offsets)
        prompts = np.zeros_like(outputs)
    else:
        prompts, outputs = _integers(archive, PROMPTS), _integers(archive, OUTPUTS)
    is_consistent = len(prompts) == len(outputs) and (prompts >= 0).all() and (outputs >= 0).all()
    if not is_consistent or int(prompts.sum() + outputs.sum()) != tokens:
        raise RecordError(BAD_LENGTHS)
    return zip(prompts.tolist(), outputs.tolist(), strict=True)


def _integers(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(name) as member:
        array = np.asarray(npy.read_array(member, allow_pickle=False))
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RecordError(BAD_LENGTHS)
    return array.astype(np.int64)


def _in_pieces(lengths: Lengths) -> Lengths:
    for prompt, output in lengths:
        while prompt == 0 and output > PIECE_TOKENS:
            yield 0, PIECE_TOKENS
            output -= PIECE_TOKENS
        yield prompt, output


def _read(
    opened: Opened, stream: BinaryIO, dtype: np.dtype[Any], lengths: Lengths, reading: Reading
) -> Iterator[Chunk]:
    items: list[Item] = []
    nbytes = 0
    for number, (prompt, output) in enumerate(_in_pieces(lengths), 1):
        data = stream.read((prompt + output) * dtype.itemsize)
        values = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)
        items += _items(values, prompt, f"{opened.label}:{number}", reading)
        nbytes += values.nbytes
        is_cut_off = len(values) < prompt + output
        if is_cut_off or nbytes >= reading.block_bytes:
            opened.advance()
            yield Chunk(items, opened.bytes_read)
            items, nbytes = [], 0
        if is_cut_off:
            raise RecordError(CUT_OFF)
    yield Chunk(items, opened.bytes_read)


def _items(values: np.ndarray, prompt: int, place: str, reading: Reading) -> list[Item]:
    try:
        tokens = token_ids(values)
    except RecordError as problem:
        reading.faults.record(str(problem), place)
        return []
    if len(tokens) <= prompt:
        reading.faults.record(NO_TOKENS, place)
        return []
    if prompt == 0:
        return [Item(place, None, tokens)]
    # A copy, which does not keep the prompt in memory.
    return [Item(place, reading.prefix_of(tokens[:prompt]), tokens[prompt:].copy())]
