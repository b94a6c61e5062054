"""Files of token ids: arrays of numpy, read as a stream, and snapshots, whose requests are read oldest first.

Each row of a 2-D array is a document. An .npz file has `tokens`, and may have `offsets` [D + 1], or `prompt_len` and
`output_len` [D]. Longer documents are split into pieces.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from drafter_service.ingest.answers import token_ids
from drafter_service.ingest.documents import NO_TOKENS, Item, RecordError
from drafter_service.ingest.files import File, Opened
from drafter_service.ingest.reading import Reading
from ssd.corpus.requests import NO_NAME, id_of_hash
from ssd.corpus.ring import SEPARATOR
from ssd.corpus.sections import SnapshotError, read_sections
from ssd.corpus.snapshot import DEPTH

PIECE_TOKENS = 1 << 16
LENGTHS = ("offsets", "prompt_len", "output_len")
NO_ARRAY = "no array `tokens` of integers with one or two dimensions"
BAD_LENGTHS = "lengths of documents that do not match the tokens"
CUT_OFF = "fewer tokens than the header says"
COPIED_AT_ONCE = 1 << 22
"""Number of bytes of a remote snapshot that are copied at a time."""
DAMAGED = "a snapshot that is damaged or incomplete"

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
        place = f"{opened.file.name}:{number}"
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


# --- Snapshots


def read_snapshot(opened: Opened, _: Reading) -> Iterator[Item]:
    """Yield the requests. Raises RecordError for a damaged snapshot."""
    opened.seekable()
    try:
        sections = _sections(opened.file)
        text, depth = sections["text"], int(sections["facts"][DEPTH])
        columns = [sections[f"requests.{name}"].tolist() for name in ("first", "name", "time", "tag")]
    except (SnapshotError, KeyError):
        raise RecordError(DAMAGED) from None
    for number, (end, name, time, tag, tokens) in enumerate(_requests(text, columns, depth), 1):
        opened.bytes_read = opened.file.size * end // len(text)
        request = "" if name == NO_NAME else id_of_hash(name)
        yield Item(f"{opened.file.name}:{number}", None, tokens, time=time, tag=tag, name=request)


def _requests(
    text: np.ndarray, columns: list[list[Any]], depth: int
) -> Iterator[tuple[int, int, float, int, np.ndarray]]:
    """Yield the requests: the position at which each ends, the hash of its id, time, tag and tokens, uint32 [N].

    Joins the pieces of each long request: a piece begins with the last `depth` tokens of the piece before it.
    """
    last = None
    for first, *facts, end in zip(*columns, [*columns[0], len(text)][1:], strict=True):
        # A separator follows each, and those of forgotten requests.
        tokens = text[first:end]
        tokens = tokens[: int((tokens == SEPARATOR).argmax())].copy()
        if last is not None:
            before = last[-1]
            shared = before[max(0, len(before) - depth) :]
            if [*last[1:-1]] == facts and np.array_equal(shared, tokens[depth - len(shared) : depth]):
                tokens = np.concatenate((before[: len(before) - len(shared)], tokens))
            else:
                yield last
        last = end, *facts, tokens
    if last is not None:
        yield last


def _sections(file: File) -> dict[str, np.ndarray]:
    """Return the arrays of a snapshot. Raises SnapshotError."""
    if file.is_local:
        return read_sections(Path(file.path))
    # A copy without a name: it is gone once the arrays are, however the process ends.
    with tempfile.TemporaryFile() as copy, file.fs.open(file.path, "rb") as remote:
        shutil.copyfileobj(remote, copy, COPIED_AT_ONCE)
        copy.flush()
        return read_sections(Path(f"/dev/fd/{copy.fileno()}"))
