"""Which drafters a comparison runs."""

import pytest

from engine.commands.compare.rows import parse_rows, unusable
from engine.drafters.registry import KINDS
from ssd.errors import UserError


def parsed(text, depths=(4,), shape="auto"):
    return [(row.name, row.depth) for row in parse_rows(text, depths, shape)]


def test_all_means_every_kind_that_drafts_here():
    names = [name for name, _ in parsed("all")]
    assert set(names) == set(KINDS) - {"none", "ssd-remote"}
    assert len(names) == len(set(names))


def test_depths_apply_to_drafters_that_have_them():
    assert parsed("mtp,ngram,ssd+mtp", (4, 8)) == [
        ("mtp", 4), ("mtp", 8), ("ngram", 4), ("ssd+mtp", 4), ("ssd+mtp", 8),
    ]  # fmt: skip
    assert parsed("none,mtp@depth=8,mtp") == [("mtp", 8), ("mtp", 4)]


def test_options_reach_the_drafter():
    [row] = parse_rows("ssd@match_depth=8@shape=path", [4], "auto")
    assert (row.name, row.drafter, dict(row.options), row.shape) == (
        "ssd@match_depth=8@shape=path", "ssd", {"match_depth": "8"}, "path",
    )  # fmt: skip
    [row] = parse_rows("mtp", [6], "auto")
    assert dict(row.options) == {"depth": "6"}


def test_networks_that_run_once_per_position_draft_paths():
    shapes = {row.name: row.shape for row in parse_rows("mtp,eagle3,medusa,ssd,ssd+mtp,mtp@shape=tree", [4], "auto")}
    assert shapes == {
        "mtp": "path", "eagle3": "path", "medusa": "tree", "ssd": "tree", "ssd+mtp": "tree", "mtp@shape=tree": "tree",
    }  # fmt: skip
    assert {row.shape for row in parse_rows("mtp,medusa", [4], "path")} == {"path"}


def test_only_paths_of_single_networks_are_sampled():
    rows = parse_rows("mtp,mtp@shape=tree,medusa,ssd,ssd+mtp,medusa@shape=path", [4], "auto")
    assert [row.name for row in rows if row.samples_q] == ["mtp", "medusa@shape=path"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic", "unknown drafter"),
        ("", "unknown drafter"),
        ("mtp@depth", "must be @NAME=VALUE"),
        ("mtp@depth=0", "depth must be a whole number from 1"),
        ("mtp@depth=x", "depth must be a whole number from 1"),
        ("mtp@width=3", "has no option width"),
        ("ssd@shape=star", "shape must be path or tree"),
        ("ssd@match_depth=x", "must be a number"),
        ("ssd+ssd", "each drafter may appear once"),
    ],
)
def test_unusable_lists_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parsed(text)


def test_kinds_without_weights_are_reported(model_folder, draft_folders, tmp_path):
    names = "ngram,mtp,ssd+mtp,self-int8,ssd+rest"
    rows = {row.name: row for row in parse_rows(names, [4], "auto")}
    assert unusable(rows["ngram"], {}, model_folder) is None
    assert unusable(rows["self-int8"], {}, model_folder) is None
    assert unusable(rows["mtp"], draft_folders, model_folder) is None
    assert unusable(rows["ssd+mtp"], {}, model_folder).startswith("no weights: ")
    assert unusable(rows["ssd+rest"], {}, model_folder).startswith("no corpus: give ssd+rest@path=SNAPSHOT, which ")
    with pytest.raises(UserError):  # given, but not usable
        unusable(rows["mtp"], {"mtp": tmp_path}, model_folder)
