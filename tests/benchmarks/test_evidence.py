"""Tables of the documentation: made from results, and those of README.md and docs/drafting.md are up to date."""

import json

import numpy as np
import pytest

from benchmarks import evidence, priors
from benchmarks.support.peers import PEERS
from benchmarks.support.replaying import own_candidates
from benchmarks.traces import load_manifest
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
    document = json.loads(evidence.FILE.read_text())
    for path in evidence.PLACES:
        assert evidence.updated(path, document) == path.read_text(), (
            f"{path.name} is stale; run: python -m benchmarks.evidence --tables-only"
        )


@pytest.mark.parametrize(
    ("table", "line"),
    [
        # Geometric means of 4 and 16, and so on; the ratio is the same for both recordings.
        (evidence.by_cost, "| SSD, trees | 8.000 | 8.000 | 1.00 | 1.00 |"),
        (evidence.by_cost, "| Arctic Inference's suffix trees | 4.000 | 4.000 | 2.00 (2.00 to 2.00) | 2.00 |"),
        (evidence.by_cost, "16 requests at once:"),
        (evidence.by_cost, "0.250 for trees, 0.010 for paths"),
        (evidence.by_cost, "Not replayed: pld (not there)."),
        (evidence.by_trace, "|  | b | a (held out) |"),
        (evidence.by_trace, "| SSD, trees | 4.00 (4.50, 4.0) | 16.00 (16.50, 4.0) |"),
        (evidence.known, "| SSD, trees | 4.50 (4.0); 9.00 (4.0) |"),
        (evidence.summary, "| SSD, paths | 6.00 (4.00 to 8.00) | 1.33 (1.33 to 1.33) | 1.33 (1.33 to 1.33) | 6.61 |"),
    ],
)
def test_tables_of_two_recordings(document, table, line):
    assert line in table(document)


def test_intervals_draw_the_same_blocks_for_all_drafters():
    ours, theirs = row("ssd", "a", 2.0), row("arctic", "a", 1.0)
    assert sorted({round(float(s), 3) for s in evidence.drawn(ours)}) == [1.333, 1.778, 2.667]
    assert evidence.interval([evidence.drawn(ours)]) == pytest.approx((4 / 3, 8 / 3), abs=1e-3)
    assert evidence.interval([evidence.drawn(ours) / evidence.drawn(theirs)]) == pytest.approx((2, 2))


def test_intervals_shrink_with_the_number_of_blocks_and_of_recordings():
    def spread(rows):
        low, high = evidence.interval(map(evidence.drawn, rows))
        return high / low

    rng = np.random.default_rng(0)
    steps = rng.integers(300, 700, 20).tolist()
    many = row("ssd", "a", 2.0) | {"blocks": [[1000] * 20, steps, [0] * 20]}
    few = many | {"blocks": [[1000] * 5, steps[:5], [0] * 5]}
    assert 1 < spread([many | {"trace": name} for name in "abcd"]) < spread([many]) < spread([few])


def test_every_drafter_has_a_name_in_the_tables():
    assert {*PEERS, "classic", "ngram", "ssd tree", "ssd path"} == {*evidence.NAMES}


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
    monkeypatch.setattr(evidence, "PEERS", ("vllm-ngram", "rest-like", "suffix-automata"))
    monkeypatch.setattr(evidence, "COSTS", (0.005, 0.1))
    paths, notes = sorted(traces.glob("*.npz")), []
    monkeypatch.setattr(priors, "LEFT_OUT", tmp_path / "priors")
    monkeypatch.setattr(priors, "LEARNED", priors.LEARNED[:1])
    teachers = {path.stem: path for path in paths}

    def measured():
        return evidence.measure(paths, teachers, tmp_path / "parts", notes.append)

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
    evidence.write(document, tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text()) == document
    assert len(notes) == made + 1, "only start values are learned again"
    (tmp_path / "parts" / "first.json").write_text(json.dumps({"made_with": "another commit"}))
    assert measured()["sections"] == sections
    assert len(notes) == made + 1 + (made + 1) // 2


def test_each_recording_starts_from_what_the_others_taught(traces, tmp_path, monkeypatch):
    """Start values without a recording do not depend on it, and differ from those of all."""
    monkeypatch.setattr(priors, "LEFT_OUT", tmp_path / "priors")
    paths = {path.stem: path for path in sorted(traces.glob("*.npz"))}
    learned = {name: [priors.learn(path, ("tree", 0.05))] for name, path in paths.items()}
    files = priors.write_left_out(learned)
    other, both = tmp_path / "other.npz", tmp_path / "both.npz"
    priors.write(priors.pooled({"second": learned["second"]}), other)
    priors.write(priors.pooled(learned), both)
    cells = {path: start_values(path)[0] for path in (files["first"], other, both)}
    assert np.array_equal(cells[files["first"]], cells[other])
    assert not np.array_equal(cells[files["first"]], cells[both])
    [candidate] = own_candidates("ssd", [8], ["tree"], [0.02], prior=files["first"])
    drafter = candidate.build(1 << 16)
    assert np.array_equal(drafter.corpus.learned.cells, cells[other])


def test_start_values_are_learned_from_all_recordings_that_are_not_held_out(tmp_path, capsys):
    held_out = {name for name, source in load_manifest().items() if not source["teaches"]}
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
        evidence.main(["--traces", str(tmp_path)])
    assert "has no traces" in capsys.readouterr().err
