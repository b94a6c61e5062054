"""A file of named arrays: written to a temporary file and renamed, and checked by checksums when it is read.

The file has a header of one block, then the sections, each in separate blocks, all little-endian. The header has the
magic, the version, the file's size, an entry for each section, and in its last four bytes the CRC-32 of the bytes
before them; an entry has the CRC-32 of its section's blocks. This module does not interpret the arrays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from ssd.errors import UserError

MAGIC = b"SSDSNAP\n"
VERSION = 1
BLOCK = 4096
READ_AT_ONCE = 1 << 22
"""Number of bytes that are read, and whose checksum is computed, at a time."""

_START = struct.Struct("<8sIIQ")
"""Magic, version, sections, size of the file."""
_ENTRY = struct.Struct("<24s8sQQI4x")
"""Name, dtype, offset and size in bytes, CRC-32."""
_CRC = struct.Struct("<I")
_DTYPES = ("<u4", "<i8", "<f4", "<f8")
MAX_SECTIONS = (BLOCK - _START.size - _CRC.size) // _ENTRY.size


class SnapshotError(UserError):
    """A snapshot cannot be written or used; the message says why and what to do."""


class DamagedError(SnapshotError):
    """A file was read, and its contents are not a whole snapshot. Reading it again would give the same."""


class Section(NamedTuple):
    """An array to be written, in pieces."""

    name: str
    """Name of the array, at most 24 bytes of ASCII."""
    dtype: str
    chunks: Iterable[np.ndarray]


class _Entry(NamedTuple):
    name: bytes
    dtype: bytes
    begin: int
    size: int
    crc: int


def write_sections(path: Path, sections: Iterable[Section], check: Callable[[], None] = lambda: None) -> int:
    """Write a file and rename it to `path` once it is safe on disk; return its size in bytes.

    Until then an existing file stays unchanged. check: called before the renaming, which does not happen if it raises
    an exception. Raises SnapshotError if writing fails.
    """
    try:
        _remove_leftovers(path)
        size = _write_and_rename(path, sections, check)
        _sync_folder(path.parent)
        return size
    except OSError as error:
        problem = error.strerror
    # Raised outside the handler, without a cause, so that a kept exception does not keep the arrays alive.
    raise SnapshotError(f"{path}: cannot be written: {problem}; free space or save elsewhere")


def read_sections(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of a file by name, read-only, after checking all checksums.

    The file is not mapped: an error of the disk at a mapped page would end the process. Raises DamagedError for a file
    of another format, cut off or damaged, and SnapshotError for one of another version or that cannot be read now.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            entries = _entries(path, file.read(BLOCK), size)
            return {entry.name.decode(errors="replace"): _read_section(path, file, entry, size) for entry in entries}
    except OSError as error:
        problem = error.strerror
    except MemoryError:
        problem = os.strerror(errno.ENOMEM)
    raise SnapshotError(f"{path}: cannot be read: {problem}")


def _write_and_rename(path: Path, sections: Iterable[Section], check: Callable[[], None]) -> int:
    written, file = _new_part(path)
    try:
        with file:
            size = _write(file, sections)
            file.flush()
            os.fsync(file.fileno())
            check()
            # The lock is still held: `_remove_leftovers` of another process removes unlocked parts.
            os.replace(written, path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
    return size


def _new_part(path: Path) -> tuple[Path, BinaryIO]:
    """Create and lock a new file in the folder of `path`."""
    while True:
        descriptor, written = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        file = os.fdopen(descriptor, "wb")
        fcntl.flock(file, fcntl.LOCK_EX)
        # Another process may have removed the file as a leftover before it was locked.
        if os.fstat(descriptor).st_nlink:
            return Path(written), file
        file.close()


def _write(file: BinaryIO, sections: Iterable[Section]) -> int:
    file.write(bytes(BLOCK))
    entries = [_write_section(file, section) for section in sections]
    assert len(entries) <= MAX_SECTIONS, "the header is full"
    size = file.tell()
    header = _START.pack(MAGIC, VERSION, len(entries), size) + b"".join(_ENTRY.pack(*entry) for entry in entries)
    header = header.ljust(BLOCK - _CRC.size, b"\0")
    file.seek(0)
    file.write(header + _CRC.pack(zlib.crc32(header)))
    return size


def _write_section(file: BinaryIO, section: Section) -> _Entry:
    begin, crc = file.tell(), 0
    for chunk in section.chunks:
        # A copy, so that the checksum matches the written bytes even if the array changes concurrently.
        data = chunk.astype(section.dtype).tobytes()
        crc = zlib.crc32(data, crc)
        file.write(data)
    size = file.tell() - begin
    padding = bytes(-size % BLOCK)
    file.write(padding)
    return _Entry(section.name.encode(), section.dtype.encode(), begin, size, zlib.crc32(padding, crc))


def _remove_leftovers(path: Path) -> None:
    """Remove unfinished files of killed processes: unlike those being written, they are not locked."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(OSError), leftover.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()


def _sync_folder(folder: Path) -> None:
    """Write the renaming to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entries(path: Path, header: bytes, actual_size: int) -> list[_Entry]:
    """Return the entries of a checked header. actual_size: of the file, in bytes."""
    if not actual_size:
        raise _damaged(path, "is empty")
    if header[: len(MAGIC)] != MAGIC[: len(header)]:
        raise DamagedError(f"{path}: is not a snapshot; give the path of one")
    if actual_size < BLOCK:
        raise _damaged(path, "is cut off")
    _check_complete(header, BLOCK)
    _, version, count, size = _START.unpack_from(header)
    if version != VERSION:
        raise SnapshotError(
            f"{path}: has format {version}, this version reads {VERSION}; read it with the version that wrote it"
        )
    if zlib.crc32(header[: -_CRC.size]) != _CRC.unpack_from(header, BLOCK - _CRC.size)[0]:
        raise _damaged(path, "its header is damaged")
    if size != actual_size:
        is_short = actual_size < size
        raise _damaged(path, f"is cut off: {actual_size:,} bytes of {size:,}" if is_short else "is too long")
    if count > MAX_SECTIONS:
        raise _damaged(path, "its header is damaged")
    entries = [_ENTRY.unpack_from(header, _START.size + index * _ENTRY.size) for index in range(count)]
    return [_Entry(name.rstrip(b"\0"), dtype.rstrip(b"\0"), *rest) for name, dtype, *rest in entries]


def _read_section(path: Path, file: BufferedReader, entry: _Entry, file_size: int) -> np.ndarray:
    size = entry.size + -entry.size % BLOCK
    dtype = entry.dtype.decode("ascii", "replace")
    is_sound = entry.name.isascii() and dtype in _DTYPES and entry.begin >= BLOCK and entry.begin + size <= file_size
    if not is_sound or entry.begin % BLOCK or entry.size % np.dtype(dtype).itemsize:
        raise _damaged(path, "its header is damaged")
    data, crc = np.empty(size, np.uint8), 0
    file.seek(entry.begin)
    for first in range(0, size, READ_AT_ONCE):
        part = data[first : first + READ_AT_ONCE].data
        _check_complete(part[: file.readinto(part)], len(part))
        crc = zlib.crc32(part, crc)
    if crc != entry.crc:
        raise _damaged(path, f"the section {entry.name.decode()} is damaged")
    data.flags.writeable = False
    return data[: entry.size].view(dtype)


def _check_complete(data: bytes | memoryview, size: int) -> None:
    """Raise OSError if fewer bytes were read than the file had when it was opened."""
    if len(data) < size:
        raise OSError(errno.EIO, "it became shorter while it was read")


def _damaged(path: Path, what: str) -> DamagedError:
    return DamagedError(f"{path}: {what}; use another snapshot")
