"""Tables of the documentation: made from results, and those of README.md and docs/drafting.md are up to date."""

import json

import numpy as np
import pytest

from benchmarks.evidence import measure, results, tables
from benchmarks.evidence.__main__ import main
from benchmarks.evidence.index_tables import index_table
from benchmarks.support.peers import PEERS


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
    document = results.read()
    for path in tables.DOCUMENTS:
        text = path.read_text()
        assert tables.BLOCK.search(text), f"{path.name} has no block of evidence"
        assert tables.updated(text, document) == text, (
            f"{path.name} is stale; run: python -m benchmarks.evidence --tables-only"
        )


def test_a_table_by_cost(document):
    text = tables.by_cost(document)
    # Geometric means of 4 and 16, and so on; the ratio is the same for both recordings.
    assert "| SSD, trees | 8.000 | 8.000 | 1.00 (1.00) |" in text
    assert "| Arctic Inference's suffix trees | 4.000 | 4.000 | 2.00 (2.00) |" in text
    assert "16 requests at once:" in text
    assert "0.250 for trees, 0.010 for paths" in text
    assert "`make evidence` on 2026-01-02, commit abc: 2 recordings, 10 output tokens each" in text
    assert "Not replayed: pld (not there)." in text


def test_a_table_by_recording(document):
    lines = tables.by_trace(document).splitlines()
    assert lines[0] == "|  | a | b |"
    assert lines[2] == "| SSD, trees | 16.00 (16.50, 4.0) | 4.00 (4.50, 4.0) |"
    assert lines[4] == "| Arctic Inference's suffix trees | 8.00 (8.50, 4.0) | 2.00 (2.50, 4.0) |"


def test_cold_and_warm_replays_share_a_cell(document):
    assert "| SSD, trees | 4.50 (4.0); 9.00 (4.0) |" in tables.known(document)


def test_the_summary_compares_with_the_recommended_drafter(document):
    assert "| SSD, paths | 6.00 | 1.33x | 6.61 |" in tables.summary(document)


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
    assert "| bytes per token at rest | 8.9 | 8.4 | 8.1 | 8.1 | 12 |" in index_table()
    assert "| path of 6 tokens | 12 / 25 us | 13 / 25 us | 15 / 29 us | 17 / 31 us | 10 / 60 us |" in index_table()


def test_results_are_read_as_they_were_written(document, tmp_path):
    results.write(document, tmp_path / "results.json")
    assert results.read(tmp_path / "results.json") == document


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
    document = results.measure(paths, tmp_path / "parts", notes.append)
    sections = document["sections"]
    # Two recordings. Single: two shapes of ssd and five others at two costs; concurrent: ssd and the automata.
    sizes = {"single": 2 * 2 * (2 + 5), "concurrent": 2 * 2 * (2 + 1), "short": 2 * (2 + 5), "known": 2 * (2 + 5)}
    assert {name: len(rows) for name, rows in sections.items()} == sizes
    for again, cold in zip(sections["known"], sections["short"], strict=True):
        assert again["tokens_per_step"] >= cold["tokens_per_step"]
        assert again["setting"] == cold["setting"]
    made = len(notes)
    assert results.measure(paths, tmp_path / "parts", notes.append) == document
    assert len(notes) == made
    (tmp_path / "parts" / "first.json").write_text(json.dumps({"made_with": "another commit"}))
    assert results.measure(paths, tmp_path / "parts", notes.append)["sections"] == sections
    assert len(notes) == made + made // 2


def test_a_folder_without_traces_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--traces", str(tmp_path)])
    assert "has no traces" in capsys.readouterr().err
