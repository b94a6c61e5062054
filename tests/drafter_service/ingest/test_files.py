"""Listing files of sources, and errors for sources that cannot be read."""

import fsspec
import pytest

from drafter_service.ingest.files import Opened, list_files
from ssd.errors import UserError


@pytest.fixture
def tree(tmp_path):
    for name in ("b/2.jsonl", "b/1.jsonl", "a.txt", ".hidden/x", "b/.x", "odd[1].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (["{tree}"], ["a.txt", "b/1.jsonl", "b/2.jsonl", "odd[1].txt"]),
        (["{tree}/b/2.jsonl", "{tree}/a.txt"], ["b/2.jsonl", "a.txt"]),
        (["{tree}/b/*.jsonl"], ["b/1.jsonl", "b/2.jsonl"]),
        (["file://{tree}/b/*2*"], ["b/2.jsonl"]),
        (["{tree}/?"], ["b/1.jsonl", "b/2.jsonl"]),
        (["{tree}/odd[1].txt"], ["odd[1].txt"]),
        (["1.jsonl"], ["b/1.jsonl"]),
        (["."], ["b/1.jsonl", "b/2.jsonl"]),
    ],
)
def test_files_are_listed_by_source_and_name_without_hidden_ones(tree, monkeypatch, sources, expected):
    monkeypatch.chdir(tree / "b")
    files = list_files([source.format(tree=tree) for source in sources])
    assert [file.name.removeprefix(f"{tree}/") for file in files] == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{tree}/missing", "there is no such file"),
        ("{tree}/*.none", "there is no such file"),
        ("{tree}/empty", "there is no such file"),
        ("s3://bucket/key", "Install s3fs"),
        ("nowhere://a", "nowhere"),
    ],
)
def test_unavailable_sources_are_errors(tree, source, message):
    (tree / "empty").mkdir()
    if source.startswith("s3") and "s3fs" in fsspec.available_protocols():
        pytest.skip("s3fs is installed")
    with pytest.raises(UserError, match=message):
        list_files([source.format(tree=tree)])


def test_missing_codecs_are_reported_with_the_package(tree, monkeypatch):
    (tree / "a.jsonl").write_bytes(b"\x28\xb5\x2f\xfd")
    monkeypatch.setattr("drafter_service.ingest.files.compr", {})
    (file,) = list_files([f"{tree}/a.jsonl"])
    with pytest.raises(UserError, match=r"pip install '\.\[zstd\]'"):
        Opened(file)
