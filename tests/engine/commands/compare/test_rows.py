"""Which drafters a comparison runs."""

import pytest

from engine.commands.compare.rows import parse_rows, unusable
from engine.drafters.registry import KINDS
from ssd.errors import UserError


def test_all_means_every_kind_that_drafts_here():
    names = [row.name for row in parse_rows("all", [4], "auto")]
    assert set(names) == set(KINDS) - {"none", "ssd-remote"}
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "depths", "shape", "expected"),
    [
        ("ssd,ngram", [4], "auto", [("ssd", {}, 4, "tree"), ("ngram", {}, 4, "path")]),
        # Depths apply to drafters that have them.
        ("mtp,ngram", [4, 8], "path", [("mtp", {"depth": "4"}, 4, "path"), ("mtp", {"depth": "8"}, 8, "path"),
                                       ("ngram", {}, 4, "path")]),
        ("ssd+mtp", [4, 8], "auto", [("ssd+mtp", {"depth": "4"}, 4, "tree"), ("ssd+mtp", {"depth": "8"}, 8, "tree")]),
        ("none,mtp@depth=8,mtp", [4], "auto", [("mtp", {"depth": "8"}, 8, "path"), ("mtp", {"depth": "4"}, 4, "path")]),
        # Networks that run once per position draft paths.
        ("eagle3,medusa", [4], "auto", [("eagle3", {"depth": "4"}, 4, "path"), ("medusa", {"depth": "4"}, 4, "tree")]),
        ("medusa", [4], "path", [("medusa", {"depth": "4"}, 4, "path")]),
        ("mtp@shape=tree", [4], "auto", [("mtp@shape=tree", {"depth": "4"}, 4, "tree")]),
        ("ssd@match_depth=8@shape=path", [4], "auto",
         [("ssd@match_depth=8@shape=path", {"match_depth": "8"}, 4, "path")]),
        ("mtp,mtp", [4], "auto", [("mtp", {"depth": "4"}, 4, "path")]),
    ],
)  # fmt: skip
def test_rows_have_names_options_depths_and_shapes(text, depths, shape, expected):
    rows = parse_rows(text, depths, shape)
    assert [(row.name, dict(row.options), row.depth, row.shape) for row in rows] == expected


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
        ("ssd@match_depth=x", "must be a whole number"),
        ("ssd+ssd", "each drafter may appear once"),
    ],
)
def test_unusable_lists_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_rows(text, [4], "auto")


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
