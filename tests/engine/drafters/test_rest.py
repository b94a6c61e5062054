"""The read-only corpus: the snapshot that it is read from, drafts from it, and that it learns nothing."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.drafters.registry import build_drafter, check_kind, configure
from engine.drafters.sources import DraftSource
from engine.engine import build_engine
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter
from ssd.config import DrafterConfig
from ssd.corpus.ring import SEPARATOR
from ssd.errors import UserError
from tests.engine.conftest import VOCAB
from tests.engine.drafters.kinds import saved_snapshot

CONFIG = EngineConfig(max_sequences=4, max_step_tokens=256, max_draft=9)
DOCUMENTS = [np.arange(start, start + 40, dtype=np.uint32) for start in (10, 60, 110)]


def texts_of(corpus):
    """The requests of a corpus, oldest first."""
    state = corpus.state()
    text = state.ring.read(state.oldest, state.head)
    ends = np.flatnonzero(text == SEPARATOR).tolist()
    return [text[start:end].tolist() for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]


class SHAPE:
    vocab_size = VOCAB


def test_snapshots_keep_their_capacity_and_match_depth(tmp_path):
    config = configure(
        "rest", DrafterConfig(), {"path": str(saved_snapshot(tmp_path / "corpus.ssd", DOCUMENTS, 10_000, 16))}
    )
    with closing(build_drafter("rest", config, TargetInfo(SHAPE, 4, 9, 16))) as drafter:
        assert (drafter.config.capacity, drafter.config.match_depth) == (10_000, 16)
        assert texts_of(drafter.corpus) == [each.tolist() for each in DOCUMENTS]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("folder", "Is a directory"),
        (b"", "is empty"),
        (b"def add(left, right):\n    return left + right\n" * 10, "is not a snapshot"),
        (b"SSDSNAP\nnothing", "corpus.ssd"),
    ],
)
def test_unusable_files_are_refused_before_the_target_is_loaded(tmp_path, model_folder, content, message):
    path = tmp_path / "corpus.ssd"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    config = configure("rest", DrafterConfig(), {"path": str(path)})
    with pytest.raises(UserError, match=message) as problem:
        check_kind("rest", config, None, model_folder)
    assert "\n" not in str(problem.value)
    assert "corpus.ssd" in str(problem.value)


def test_a_snapshot_of_another_vocabulary_is_refused(tmp_path, model_folder):
    path = saved_snapshot(tmp_path / "corpus.ssd", [[5, VOCAB]])
    with pytest.raises(UserError, match=f"has the token id {VOCAB}"):
        check_kind("rest", configure("rest", DrafterConfig(), {"path": str(path)}), None, model_folder)


def requests(temperature):
    rng = np.random.default_rng(1)
    return [
        Request(rng.integers(1, 60, 20).astype(np.uint32), SamplingParams(40, temperature, seed, ignore_eos=True))
        for seed in range(5)
    ]


@pytest.mark.parametrize("shape", ["path", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_outputs_in_the_corpus_are_drafted_and_nothing_is_learned(model, tmp_path, shape, temperature):
    submitted, config = requests(temperature), replace(CONFIG, draft_shape=shape)
    plain = [each.tokens.tolist() for each in build_engine(model, config, NoDrafter()).generate(submitted)]
    earlier = [
        np.append(request.prompt, tokens).astype(np.uint32)
        for request, tokens in zip(submitted[:3], plain[:3], strict=True)
    ]
    path = saved_snapshot(tmp_path / "earlier.ssd", earlier)
    settings = configure("rest", DrafterConfig(draft_shape=shape), {"path": str(path)})
    drafter = build_drafter("rest", settings, TargetInfo.from_model(model, config))
    before = texts_of(drafter.corpus)
    sources = set()
    engine = build_engine(model, config, drafter)
    for _ in range(2):
        steps = []
        for request, tokens in zip(submitted, plain, strict=True):
            [completion] = engine.generate(
                [request], lambda report: sources.update(report.arrays.drafted_sources.tolist())
            )
            assert completion.tokens.tolist() == tokens
            steps.append(completion.steps)
        # The last two requests are not in the corpus, even when they are repeated.
        assert max(steps[:3]) < 20 < min(steps[3:])
    assert DraftSource.REST in sources <= {DraftSource.REST, DraftSource.LOCAL}
    drafter.corpus.refresh()
    assert texts_of(drafter.corpus) == before
    engine.close()
