"""Pages of the benchmarks, made from results that the project keeps."""

import json

import pytest

from benchmarks import soak
from benchmarks.cluster import page
from benchmarks.rollouts import runs
from benchmarks.support.command import RESULTS
from benchmarks.support.targets import at_least, at_most, conclude
from tests.browser import page_faults
from tests.markup import tags_of

PAGES = {
    "cluster-2026-11-25": page.render_page,
    "soak-2026-11-26": soak.render_page,
    "rollouts-2026-11-26": runs.render_page,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_all_targets_and_readable_charts(name, tmp_path):
    document = json.loads((RESULTS / f"{name}.json").read_text())
    for fault in document.get("faults", []):
        fault.setdefault("took_effect", True)  # Not in older results.
    path = tmp_path / f"{name}.html"
    path.write_text(PAGES[name](document), encoding="utf-8")
    shown = path.read_text()
    assert tags_of(shown)["svg"] >= 2
    assert all(f">{target['name']}<" in shown for target in document["targets"])
    assert page_faults(path) == []


@pytest.mark.parametrize(("value", "code"), [(2.0, 0), (2.1, 1)])
def test_a_missed_target_is_the_exit_code(value, code, tmp_path, capsys):
    document = {"targets": [at_most(2).row("delay", value), at_least(1).row("speed", 1.0)]}
    with pytest.raises(SystemExit) as ended:
        conclude("name", document, "<p>", tmp_path)
    assert ended.value.code == code
    said = capsys.readouterr()
    assert json.loads(said.out) == json.loads((tmp_path / "name.json").read_text()) == document
    assert (tmp_path / "name.html").read_text() == "<p>"
    assert ("MISSED   delay: 2.1 (at most 2)" in said.err) == bool(code)
    assert "reached  speed: 1 (at least 1)" in said.err
