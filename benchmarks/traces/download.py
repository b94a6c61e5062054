"""Download files over HTTP: each is checked against its digest, and continued where an earlier download ended."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlsplit

from benchmarks.traces.manifest import Remote

CHUNK = 1 << 16
TRIES = 3
TIMEOUT_S = 30


class DownloadError(Exception):
    """A file could not be downloaded, or is not the expected one."""


def download(remote: Remote, path: Path, mirror: str | None, advance: Callable[[int], None]) -> None:
    """Download a file to `path` unless it is there.

    mirror: base URL of a copy of the hosts, in which a file's address follows as HOST/PATH. advance: called with the
    number of bytes that are there in addition. The part of a download that was interrupted is in `path` with the suffix
    `.part`. Raises DownloadError.
    """
    if path.exists() and _sha256(path) == remote.sha256:
        advance(remote.size)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    if part.exists() and part.stat().st_size > remote.size:
        part.unlink()
    advance(_size(part))
    url, reason = _address(remote.url, mirror), "the connection ended early"
    for _ in range(TRIES):
        if _size(part) >= remote.size:
            break
        try:
            _continue(url, part, advance)
        except urllib.error.HTTPError as error:
            raise DownloadError(f"{url}: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = str(error)
    if _size(part) < remote.size:
        raise DownloadError(f"{url}: {reason}; the same command continues the download")
    if (found := _sha256(part)) != remote.sha256:
        part.unlink()
        raise DownloadError(f"{url} is another file than expected: its SHA-256 is {found}, not {remote.sha256}")
    part.replace(path)


def _address(url: str, mirror: str | None) -> str:
    parts = urlsplit(url)
    base = f"{parts.scheme}://{parts.netloc}" if mirror is None else f"{mirror.rstrip('/')}/{parts.netloc}"
    return base + quote(parts.path)


def _continue(url: str, part: Path, advance: Callable[[int], None]) -> None:
    """Append the rest of a file to `part`, or start again if the server does not send parts."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        continues = have > 0 and answer.status == http.client.PARTIAL_CONTENT
        if not continues:
            advance(-have)
        with part.open("ab" if continues else "wb") as file:
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                advance(len(chunk))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
