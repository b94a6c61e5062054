"""Find files by path or URL and open them, through fsspec, as uncompressed bytes; text in another encoding as UTF-8."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

import fsspec
from fsspec.compression import compr
from fsspec.implementations.local import LocalFileSystem

from drafter_service.ingest.documents import RecordError
from ssd.errors import UserError, missing_extra

CODECS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""Compression by the first bytes, with the names of fsspec."""
CODEC_SUFFIXES = frozenset((".gz", ".bz2", ".xz", ".zst"))
MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
"""Encodings by byte order mark."""
HEAD_BYTES = 1 << 16
"""Number of first bytes by which the format of a file is detected."""
STDIN = "/dev/stdin"
CUT = "a file that is cut off or damaged; what precedes the damage is read"
NOT_SEEKABLE = "a format that cannot be read from a pipe or within an archive; give the path of the file itself"


@dataclass(frozen=True)
class File:
    """A file to read."""

    fs: Any
    path: str
    """Path in its file system."""
    name: str
    """Absolute path or URL, for messages."""
    size: int
    """Bytes; 0 if not known."""

    @property
    def suffix(self) -> str:
        """Suffix of the name without that of the compression, such as ".jsonl"."""
        path = PurePosixPath(self.path)
        return (path.with_suffix("") if path.suffix.lower() in CODEC_SUFFIXES else path).suffix.lower()

    @property
    def is_local(self) -> bool:
        """Whether it can be mapped into memory at `path`."""
        return isinstance(self.fs, LocalFileSystem)


class Opened:
    """An open file. `data` is the uncompressed content, from its beginning."""

    def __init__(self, file: File) -> None:
        """Open a file. Raises UserError if the package for its compression is missing."""
        self.file = file
        self.problem = ""
        """Reason why `data` ends before the file does."""
        self.bytes_read = 0
        """Bytes read so far, relative to `File.size`; readers set it from time to time."""
        # Not through fsspec, which cannot open pipes.
        self._raw = open(file.path, "rb") if file.is_local else file.fs.open(file.path, "rb")  # noqa: SIM115
        self._source: Any = self._raw
        self._load()
        codec = next((name for magic, name in CODECS.items() if self.head.startswith(magic)), None)
        if codec:
            if codec not in compr:
                raise missing_extra(f"{file.name} is compressed with Zstandard, which needs zstandard", "zstd")
            self._source = compr[codec](self.data, mode="rb")
            self._load()

    def _load(self) -> None:
        """Set `head` and `data`."""
        chunks = self._chunks(self._source)
        self.head = _first_of(chunks)
        encoding = _encoding(self.head)
        if encoding:
            decoded = codecs.iterdecode(chain([self.head], chunks), encoding, "replace")
            chunks = codecs.iterencode(decoded, "utf-8")
            self.head = _first_of(chunks)
        elif self._source is self._raw and self._raw.seekable():
            self._raw.seek(0)
            self.data = cast(BinaryIO, self._raw)
            return
        self.data = cast(BinaryIO, io.BufferedReader(_Stream(chain([self.head], chunks)), HEAD_BYTES))

    def _chunks(self, stream: Any) -> Iterator[bytes]:
        """Yield the content; its end may be missing, which `problem` says."""
        read = getattr(stream, "read1", stream.read)
        try:
            while chunk := read(HEAD_BYTES):
                yield chunk
        except Exception:  # Each codec and file system raises its own types.
            self.problem = CUT

    def advance(self) -> None:
        """Update `bytes_read` from the position in the file."""
        if self._raw.seekable():
            self.bytes_read = int(self._raw.tell())

    def seekable(self) -> BinaryIO:
        """Return the uncompressed content as a stream that can seek. Raises RecordError if there is none."""
        if not (self._raw.seekable() and self._source.seekable()):
            raise RecordError(NOT_SEEKABLE)
        self._source.seek(0)
        return cast(BinaryIO, self._source)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._source.close()
        self._raw.close()


class _Stream(io.RawIOBase):
    """A stream of the bytes that an iterator yields."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or next(self._chunks, b"")
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _first_of(chunks: Iterator[bytes]) -> bytes:
    """Return at least `HEAD_BYTES`, or everything."""
    head = b""
    while len(head) < HEAD_BYTES and (chunk := next(chunks, b"")):
        head += chunk
    return head


def _encoding(head: bytes) -> str | None:
    """Return the encoding of text that is not plain UTF-8, also of UTF-16 without a mark; None for other content."""
    even, odd = head[::2], head[1::2]
    for mark, encoding in MARKS.items():
        if head.startswith(mark):
            return encoding
    for encoding, low, high in (("utf-16-le", even, odd), ("utf-16-be", odd, even)):
        if high.count(0) > len(high) // 2 and all(byte >= 32 or byte in b"\t\r\n" for byte in low):
            return encoding
    return None


def list_files(sources: Iterable[str]) -> list[File]:
    """Return all files of paths, folders, globs and URLs, in the order of the sources, and by name within folders.

    Raises UserError for a source that is missing or unreachable.
    """
    return [file for source in sources for file in _files_of(source)]


def _files_of(source: str) -> list[File]:
    try:
        path = STDIN if source == "-" else source
        fs, path = fsspec.core.url_to_fs(path if "://" in path else str(Path(path).expanduser().absolute()))
        infos = list(_infos(fs, path))
    except FileNotFoundError:
        infos = []
    except ImportError as problem:
        raise UserError(f"{source}: a package is missing to read it: {problem}") from None
    except Exception as problem:  # Object stores raise exceptions of many types.
        raise UserError(f"{source}: cannot be read: {problem or type(problem).__name__}") from None
    if not infos:
        raise UserError(f"{source}: there is no such file, or no file in it; give a path, a folder, a glob or a URL")
    is_local = isinstance(fs, LocalFileSystem)
    names = [(info["name"] if is_local else fs.unstrip_protocol(info["name"])) for info in infos]
    return [File(fs, info["name"], name, info.get("size") or 0) for info, name in zip(infos, names, strict=True)]


def _infos(fs: Any, path: str) -> Iterator[dict[str, Any]]:
    """Yield the metadata of the files at a path, without hidden files, hidden folders and `__pycache__`."""
    if any(sign in path for sign in "*?[") and not fs.exists(path):
        for found in sorted(fs.glob(path)):
            yield from _infos(fs, found)
        return
    info = fs.info(path)
    if info["type"] != "directory":
        yield info
        return
    for name, inner in sorted(fs.find(path, detail=True).items()):
        parts = PurePosixPath(name).relative_to(PurePosixPath(path)).parts
        if not any(part.startswith(".") or part == "__pycache__" for part in parts):
            yield inner
