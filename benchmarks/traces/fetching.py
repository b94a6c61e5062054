"""Make traces from public repositories: download, convert, check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.traces.conversion import Arrays, convert
from benchmarks.traces.download import download
from benchmarks.traces.formats import FORMATS
from benchmarks.traces.manifest import Manifest, Remote
from benchmarks.traces.vocabularies import VOCABULARIES, ChatEncoder, Encoder, load_encoder


def remote_files(manifest: Manifest, name: str, folder: Path) -> list[tuple[Remote, Path]]:
    """Return the files that a trace needs and their places in `folder`; the texts of licences come first."""
    source = manifest.traces[name]
    vocabulary = manifest.vocabularies[source.vocabulary]
    return [
        (source.notice, folder / "licences" / f"{name}.txt"),
        (vocabulary.notice, folder / "licences" / f"{source.vocabulary}.txt"),
        (vocabulary.ranks, _ranks(folder, source.vocabulary)),
        *((remote, _raw(folder, name, path)) for path, remote in source.files.items()),
    ]


def _ranks(folder: Path, vocabulary: str) -> Path:
    return folder / "sources" / f"{vocabulary}.ranks"


def _raw(folder: Path, name: str, path: str) -> Path:
    return folder / "sources" / name / path


def fetch(
    manifest: Manifest,
    name: str,
    folder: Path,
    mirror: str | None = None,
    advance: Callable[[int], None] = lambda _bytes: None,
    encoder_of: Callable[[str, Path], Encoder] = load_encoder,
) -> list[str]:
    """Write the trace NAME.npz into `folder`, and return in which respects it differs from the manifest.

    A trace that is there and equals the manifest is kept. Raises DownloadError, and ValueError for files that cannot be
    converted.
    """
    source, result = manifest.traces[name], folder / f"{name}.npz"
    files = remote_files(manifest, name, folder)
    if result.exists() and not source.differences(read_arrays(result)):
        advance(sum(remote.size for remote, _ in files))
        return []
    for remote, path in files:
        download(remote, path, mirror, advance)
    texts = {path: _raw(folder, name, path).read_text(encoding="utf-8") for path in source.files}
    encoder = encoder_of(source.vocabulary, _ranks(folder, source.vocabulary))
    chats = ChatEncoder(VOCABULARIES[source.vocabulary], encoder)
    try:
        arrays = convert(FORMATS[source.format](texts), chats, source.limits)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"the files of {name} are not in the format {source.format}: {error!r}") from error
    part = result.with_name(f"{name}.part.npz")
    np.savez_compressed(part, **arrays)
    part.replace(result)
    return source.differences(arrays)


def read_arrays(path: Path) -> Arrays:
    """Return the arrays of a trace."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files}
