import numpy as np

from benchmarks.adapter_corpus import KINDS, measure, split, switched, windows


def write(path, texts):
    """A trace of 200 requests, each with a prompt of one token and one of `texts`, [N, O], as its output."""
    rng = np.random.default_rng(0)
    groups = np.arange(200)
    outputs = texts[rng.integers(len(texts), size=200)]
    prompts = rng.integers(1000, 2000, (200, 1))
    lengths = {"prompt_len": np.full(200, 1), "output_len": np.full(200, outputs.shape[1])}
    tokens = np.concatenate((prompts, outputs), 1).ravel().astype(np.uint32)
    np.savez(path, tokens=tokens, session=groups, group=groups, **lengths)


def test_a_base_corpus_of_the_same_texts_helps_until_the_adapter_has_produced_them(tmp_path):
    write(tmp_path / "trace.npz", np.random.default_rng(1).integers(1, 1000, (40, 30)))
    base, own = split(tmp_path / "trace.npz")
    assert len(base.requests) == len(own.requests) == 100
    found = {kind: measure(kind, base, own, 0.02) for kind in KINDS}
    ends = [end for end, _ in windows(own)]
    assert [list(found[kind]) for kind in KINDS] == [ends] * 3
    assert sum(counts.tokens for counts in found["own"].values()) == own.output_tokens == ends[-1]
    first, last = ([found[kind][end].speed(0.02) for kind in KINDS] for end in (ends[0], ends[-1]))
    assert first[1] > 1.2 * first[0]
    assert last[1] / last[0] < first[1] / first[0]
    speeds = [switched(found, until).speed(0.02) for until in (0, ends[0])]
    assert speeds[1] > speeds[0]
