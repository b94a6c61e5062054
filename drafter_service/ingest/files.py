"""Find files by path or URL and open them as streams of bytes, through fsspec; contents are not interpreted."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

import fsspec
from fsspec.compression import compr
from fsspec.implementations.local import LocalFileSystem

from ssd.errors import UserError

CODECS = {"gz": "gzip", "zst": "zstd"}
"""Compression by suffix, with the names of fsspec."""


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
    def codec(self) -> str | None:
        """Name of the compression; None without one."""
        return CODECS.get(PurePosixPath(self.path).suffix.lstrip(".").lower())

    @property
    def suffix(self) -> str:
        """Suffix of the name without that of the compression, such as ".jsonl"."""
        path = PurePosixPath(self.path)
        return (path.with_suffix("") if self.codec else path).suffix.lower()

    @property
    def is_local(self) -> bool:
        """Whether it can be mapped into memory at `path`."""
        return isinstance(self.fs, LocalFileSystem)


class Opened:
    """An open file. `data` is the uncompressed content."""

    def __init__(self, file: File) -> None:
        self.file = file
        self._raw = file.fs.open(file.path, "rb")
        self.data = cast(BinaryIO, self._raw)
        if file.codec:
            content = compr[file.codec](self._raw, mode="rb")
            buffered = content if isinstance(content, io.BufferedIOBase) else io.BufferedReader(content)
            self.data = cast(BinaryIO, buffered)

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, relative to `File.size`."""
        return int(self._raw.tell())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.data.close()
        self._raw.close()


def list_files(sources: Iterable[str]) -> list[File]:
    """Return all files of paths, folders, globs and URLs, in the order of the sources, and by name within folders.

    Raises UserError for a source that is missing or unreachable.
    """
    return [file for source in sources for file in _files_of(source)]


def check_codecs(files: Iterable[File]) -> None:
    """Raise UserError with the package to install if a file cannot be decompressed."""
    for file in files:
        if file.codec and file.codec not in compr:
            raise UserError(f"{file.name} is compressed with {file.codec}; run: pip install zstandard")


def _files_of(source: str) -> list[File]:
    try:
        fs, path = fsspec.core.url_to_fs(_absolute(source))
        infos = list(_infos(fs, path))
    except FileNotFoundError:
        infos = []
    except ImportError as problem:
        raise UserError(f"{source}: a package is missing to read it: {problem}") from None
    except Exception as problem:  # Object stores raise exceptions of many types.
        raise UserError(f"{source}: cannot be read: {problem or type(problem).__name__}") from None
    if not infos:
        raise UserError(f"{source}: there is no such file, or no file in it; give a path, a folder, a glob or a URL")
    return [_file(fs, info) for info in infos]


def _absolute(source: str) -> str:
    return source if "://" in source else str(Path(source).expanduser().absolute())


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


def _file(fs: Any, info: dict[str, Any]) -> File:
    path = str(info["name"])
    name = path if isinstance(fs, LocalFileSystem) else str(fs.unstrip_protocol(path))
    return File(fs, path, name, int(info.get("size") or 0))
