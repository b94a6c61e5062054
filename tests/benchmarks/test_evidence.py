"""Tables of the documentation: made from results, and those of README.md and docs/drafting.md are up to date."""

import json

import numpy as np
import pytest

from benchmarks import priors
from benchmarks.evidence import __main__ as measure
from benchmarks.evidence import tables
from benchmarks.support.drafters import own_candidates, starting_from
from benchmarks.support.peers import PEERS
from benchmarks.traces import load_trace
from benchmarks.traces.fetching import load_manifest
from ssd.kernels.learned import start_values


def row(drafter, trace, s, *, shape="path", cost=0.02, concurrency=1, drafted=4.0):
    setting = f"{shape} k=16" if drafter in ("ssd", "arctic") else "k=16"
    return {
        "trace": trace,
        "drafter": drafter,
        "setting": setting,
        "shape": shape,
        "k": 16,
        "cost": cost,
        "concurrency": concurrency,
        "output_tokens": 10,
        "tokens_per_step": s + 0.5,
        "drafted_per_step": drafted,
        "S": s,
        "ece": 0.01 if drafter == "ssd" else None,
        # Two blocks, of which the first is twice as fast: S is 4/3 s or 2/3 s if one of them is drawn twice.
        "blocks": [[40_000, 40_000], [round(30_000 / s), round(60_000 / s)], [0, 0]],
    }


@pytest.fixture
def document():
    single = [
        row(drafter, trace, s * factor, shape=shape, cost=cost)
        for drafter, shape, s in (("ssd", "tree", 4.0), ("ssd", "path", 3.0), ("arctic", "tree", 2.0))
        for trace, factor in (("b", 1.0), ("a", 4.0))
        for cost in (0.02, 0.1)
    ]
    single[0]["ece"] = 0.25
    return {
        "date": "2026-01-02",
        "commit": "abc",
        "output_tokens": 10,
        "held_out": ["a"],
        "skipped": {"pld": "not there"},
        "versions": {"python": "3.11", "ssd-drafter": "0.1"},
        "sections": {
            "single": single,
            "concurrent": [{**one, "concurrency": 16} for one in single],
            "short": single[:1],
            "known": [{**single[0], "tokens_per_step": 9.0}],
        },
    }


def test_tables_of_the_documentation_are_those_of_the_results():
    document = measure.read()
    for path in tables.DOCUMENTS:
        text = path.read_text()
        assert tables.BLOCK.search(text), f"{path.name} has no block of evidence"
        assert tables.updated(text, document) == text, (
            f"{path.name} is stale; run: python -m benchmarks.evidence --tables-only"
        )


def test_a_table_by_cost(document):
    text = tables.by_cost(document)
    # Geometric means of 4 and 16, and so on; the ratio is the same for both recordings.
    assert "| SSD, trees | 8.000 | 8.000 | 1.00 | 1.00 |" in text
    assert "| Arctic Inference's suffix trees | 4.000 | 4.000 | 2.00 (2.00 to 2.00) | 2.00 |" in text
    assert "16 requests at once:" in text
    assert "0.250 for trees, 0.010 for paths" in text
    assert "`make evidence` on 2026-01-02, commit abc: 2 recordings, 10 output tokens each" in text
    assert "Not replayed: pld (not there)." in text
    assert "learned without the recording at hand; nothing was learned from a." in text


def test_a_table_by_recording(document):
    lines = tables.by_trace(document).splitlines()
    assert lines[0] == "|  | b | a (held out) |"
    assert lines[2] == "| SSD, trees | 4.00 (4.50, 4.0) | 16.00 (16.50, 4.0) |"
    assert lines[4] == "| Arctic Inference's suffix trees | 2.00 (2.50, 4.0) | 8.00 (8.50, 4.0) |"


def test_cold_and_warm_replays_share_a_cell(document):
    assert "| SSD, trees | 4.50 (4.0); 9.00 (4.0) |" in tables.known(document)


def test_the_summary_compares_with_the_recommended_drafter(document):
    text = tables.summary(document)
    line = "| SSD, paths | 6.00 (4.00 to 8.00) | 1.33 (1.33 to 1.33) | 1.33 (1.33 to 1.33) | 6.61 |"
    assert line in text
    document["held_out"] = []
    assert "nothing was learned from" not in tables.summary(document)


def test_intervals_draw_the_same_blocks_for_all_drafters():
    ours, theirs = row("ssd", "a", 2.0), row("arctic", "a", 1.0)
    assert sorted({round(float(s), 3) for s in tables.drawn(ours)}) == [1.333, 1.778, 2.667]
    assert tables.interval_of_s([ours]) == pytest.approx((4 / 3, 8 / 3), abs=1e-3)
    assert tables.interval_of_ratio([ours], [theirs]) == pytest.approx((2, 2))


def test_intervals_shrink_with_the_number_of_blocks_and_of_recordings():
    def spread(rows):
        low, high = tables.interval_of_s(rows)
        return high / low

    rng = np.random.default_rng(0)
    steps = rng.integers(300, 700, 20).tolist()
    many = row("ssd", "a", 2.0) | {"blocks": [[1000] * 20, steps, [0] * 20]}
    few = many | {"blocks": [[1000] * 5, steps[:5], [0] * 5]}
    assert 1 < spread([many | {"trace": name} for name in "abcd"]) < spread([many]) < spread([few])


def test_only_blocks_are_replaced(document):
    text = "before\n<!-- evidence: by_trace -->\nold\n<!-- end -->\nafter\n"
    new = tables.updated(text, document)
    assert new == f"before\n<!-- evidence: by_trace -->\n{tables.by_trace(document)}<!-- end -->\nafter\n"
    assert tables.updated(new, document) == new
    with pytest.raises(KeyError, match="nothing"):
        tables.updated("<!-- evidence: nothing -->\n<!-- end -->", document)


def test_every_drafter_has_a_name_in_the_tables():
    assert {*PEERS, "classic", "ngram", "ssd tree", "ssd path"} == {*tables.NAMES}


def test_figures_of_the_index_come_from_its_results():
    assert "| bytes per token at rest | 8.9 | 8.4 | 8.1 | 8.1 | 12 |" in tables.index_table({})
    assert (
        "| path of 6 tokens | 12 / 25 us | 13 / 25 us | 15 / 29 us | 17 / 31 us | 10 / 60 us |"
        in tables.index_table({})
    )


def test_results_are_read_as_they_were_written(document, tmp_path):
    measure.write(document, tmp_path / "results.json")
    assert measure.read(tmp_path / "results.json") == document


@pytest.fixture
def traces(tmp_path):
    """Two small traces with repeats."""
    folder = tmp_path / "traces"
    folder.mkdir()
    for seed, name in enumerate(("first", "second")):
        tokens = np.tile(np.random.default_rng(seed).integers(0, 50, 40), 3).astype(np.uint32)
        lengths = np.full(3, 20, np.int32)
        np.savez(folder / f"{name}.npz", tokens=tokens, prompt_len=lengths, output_len=lengths, session=np.arange(3))
    return folder


def test_a_measurement_has_all_sections_and_continues(traces, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "PEERS", ("vllm-ngram", "rest-like", "suffix-automata"))
    monkeypatch.setattr(measure, "COSTS", (0.005, 0.1))
    paths, notes = sorted(traces.glob("*.npz")), []
    monkeypatch.setattr(priors, "LEFT_OUT", tmp_path / "priors")
    monkeypatch.setattr(priors, "LEARNED", priors.LEARNED[:1])
    teachers = {path.stem: path for path in paths}

    def measured():
        return measure.measure(paths, teachers, tmp_path / "parts", notes.append)

    document = measured()
    assert document["held_out"] == []
    sections = document["sections"]
    # Two recordings. Single: two shapes of ssd and five others at two costs; concurrent: ssd and the automata.
    sizes = {"single": 2 * 2 * (2 + 5), "concurrent": 2 * 2 * (2 + 1), "short": 2 * (2 + 5), "known": 2 * (2 + 5)}
    assert {name: len(rows) for name, rows in sections.items()} == sizes
    for again, cold in zip(sections["known"], sections["short"], strict=True):
        assert again["tokens_per_step"] >= cold["tokens_per_step"]
        assert again["setting"] == cold["setting"]
    made = len(notes)
    assert measured() == document
    assert len(notes) == made + 1, "only start values are learned again"
    (tmp_path / "parts" / "first.json").write_text(json.dumps({"made_with": "another commit"}))
    assert measured()["sections"] == sections
    assert len(notes) == made + 1 + (made + 1) // 2


def test_each_recording_starts_from_what_the_others_taught(traces, tmp_path, monkeypatch):
    """Start values without a recording do not depend on it, and differ from those of all."""
    monkeypatch.setattr(priors, "LEFT_OUT", tmp_path / "priors")
    paths = {path.stem: path for path in sorted(traces.glob("*.npz"))}
    learned = {name: [priors.learn(priors.Task(path, "tree", 0.05, 1000))] for name, path in paths.items()}
    files = priors.write_left_out(learned)
    other, both = tmp_path / "other.npz", tmp_path / "both.npz"
    priors.write(priors.pooled({"second": learned["second"]}), other)
    priors.write(priors.pooled(learned), both)
    cells = {path: start_values(path)[0] for path in (files["first"], other, both)}
    assert np.array_equal(cells[files["first"]], cells[other])
    assert not np.array_equal(cells[files["first"]], cells[both])
    [candidate] = own_candidates("ssd", [8], ["tree"], [0.02])
    drafter = starting_from(candidate, files["first"]).build(load_trace(paths["first"]).traffic())
    assert np.array_equal(drafter.corpus.learned.cells, cells[other])


def test_start_values_are_learned_from_all_recordings_that_are_not_held_out(tmp_path, capsys):
    held_out = {name for name, source in load_manifest().items() if not source.teaches}
    assert held_out == {"agent-react-davinci3", "code-lcb-o1preview"}
    for name in load_manifest():
        (tmp_path / f"{name}.npz").touch()
    teachers = priors.teachers_in(tmp_path)
    assert held_out.isdisjoint(teachers)
    assert len(teachers) == 7
    with pytest.raises(SystemExit):
        priors.main(["--traces", str(tmp_path), "--without", "code-lcb-o1preview"])
    assert "code-lcb-o1preview is not one of agent-mint-gpt4" in capsys.readouterr().err
    teachers["agent-mint-gpt4"].unlink()
    with pytest.raises(ValueError, match="does not have agent-mint-gpt4, which start values are learned from"):
        priors.teachers_in(tmp_path)


def test_a_folder_without_traces_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        measure.main(["--traces", str(tmp_path)])
    assert "has no traces" in capsys.readouterr().err
