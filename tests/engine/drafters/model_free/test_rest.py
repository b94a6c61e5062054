"""The read-only corpus: files that it is read from, drafts from it, and that it learns nothing."""

import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.drafters.model_free.none import NoDrafter
from engine.drafters.model_free.rest_corpus import check_corpus, load_corpus
from engine.drafters.registry import build_drafter, check_kind, configure
from engine.drafters.sources import DraftSource
from engine.engine import build_engine
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Request, SamplingParams
from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.ring import SEPARATOR
from ssd.errors import UserError
from tests.engine.conftest import TEXT, VOCAB

CONFIG = EngineConfig(max_sequences=4, max_step_tokens=256, max_draft=9)
DOCUMENTS = [np.arange(start, start + 40, dtype=np.uint32) for start in (10, 60, 110)]


def texts_of(corpus):
    """The requests of a corpus, oldest first."""
    state = corpus.state()
    text = state.ring.read(state.oldest, state.head)
    ends = np.flatnonzero(text == SEPARATOR).tolist()
    return [text[start:end].tolist() for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]


def load(path, folder=None, **settings):
    check_corpus(path, VOCAB)
    with closing(load_corpus(path, VOCAB, folder, DrafterConfig(**settings))) as corpus:
        assert corpus.waiting == 0
        return texts_of(corpus)


def test_token_files(tmp_path):
    whole, lengths = np.concatenate(DOCUMENTS), np.array([len(each) for each in DOCUMENTS])
    np.save(tmp_path / "rows.npy", np.stack(DOCUMENTS).astype(np.int64))
    np.save(tmp_path / "one.npy", whole.astype(np.uint16))
    np.savez(tmp_path / "rows.npz", tokens=np.stack(DOCUMENTS))
    np.savez(tmp_path / "offsets.npz", tokens=whole, offsets=np.cumsum([0, *lengths]))
    np.savez(tmp_path / "lengths.npz", tokens=whole, prompt_len=np.full(3, 30), output_len=lengths - 30)
    expected = [each.tolist() for each in DOCUMENTS]
    assert load(tmp_path / "rows.npy") == load(tmp_path / "rows.npz") == load(tmp_path / "offsets.npz") == expected
    assert load(tmp_path / "one.npy") == [whole.tolist()]
    assert load(tmp_path / "lengths.npz", learned_prompt_tokens=4) == [each[26:] for each in expected]


def test_text_and_records_are_tokenized(tmp_path, model_folder):
    tokenizer = Tokenizer(model_folder)
    (tmp_path / "code.py").write_text(TEXT)
    assert load(tmp_path / "code.py", model_folder) == [tokenizer.encode(TEXT).tolist()]
    records = [
        {"prompt": "def add(", "completion": "left, right):", "tokens": [5, 6, 7]},
        {"prompt": [1, 2, 3], "completion": "    return left"},
        {"text": "class Pair:"},
    ]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + "\n")
    encode = tokenizer.encode
    assert load(tmp_path / "records.jsonl", model_folder, learned_prompt_tokens=2) == [
        [*encode("def add(")[-2:].tolist(), 5, 6, 7],
        [2, 3, *encode("    return left").tolist()],
        encode("class Pair:").tolist(),
    ]


def test_long_text_is_tokenized_in_pieces(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr("engine.drafters.model_free.rest_corpus.PIECE_CHARACTERS", 30)
    (tmp_path / "code.txt").write_text(TEXT)
    pieces = load(tmp_path / "code.txt", model_folder)
    assert len(pieces) > 5
    assert "".join(Tokenizer(model_folder).decode(np.array(piece)) for piece in pieces) == TEXT


def test_the_capacity_keeps_the_newest_tokens(tmp_path):
    rows = np.random.default_rng(0).integers(0, VOCAB, (300, 1000))
    np.save(tmp_path / "rows.npy", rows)
    kept = load(tmp_path / "rows.npy", capacity=100_000)
    assert 90 < len(kept) < 110
    assert kept[-1] == rows[-1].tolist()


def saved_snapshot(path, documents=DOCUMENTS, depth=16):
    with closing(Corpus(10_000, depth)) as corpus:
        for each in documents:
            corpus.append(each)
        snapshot.save(corpus, path)
    return path


def test_snapshots_keep_their_capacity_and_match_depth(tmp_path):
    path = saved_snapshot(tmp_path / "corpus.ssd")
    assert load(path) == [each.tolist() for each in DOCUMENTS]
    config = configure("rest", DrafterConfig(), {"path": str(path)})
    with closing(build_drafter("rest", config, TargetInfo(SHAPE, 4, 9, 16))) as drafter:
        assert (drafter.config.capacity, drafter.config.match_depth) == (10_000, 16)


class SHAPE:
    vocab_size = VOCAB


def write(path, content):
    if isinstance(content, dict):
        np.savez(path, **content)
    elif isinstance(content, np.ndarray):
        np.save(path, content)
    elif content is not None:
        path.write_bytes(content)
    return path


FAULTS = {
    "absent.npy": (None, "No such file"),
    "empty.txt": (b"", "has no text and no tokens"),
    "binary.txt": (b"\xff\xfe\x00", "cannot read"),
    "cut.npy": (b"\x93NUMPY", "cannot read"),
    "cut.npz": (b"PK\x03\x04", "cannot read"),
    "floats.npy": (np.ones(3), "no array of token ids"),
    "negative.npy": (np.array([-1]), "no array of token ids"),
    "objects.npy": (np.array([[]], object), "cannot read"),
    "foreign.npy": (np.array([1, VOCAB]), f"holds the token id {VOCAB}, but the target's vocabulary ends at"),
    "names.npz": ({"ids": np.arange(3)}, "cannot read"),
    "lengths.npz": ({"tokens": np.arange(3), "offsets": np.array([0, 2])}, "lengths of documents do not match"),
    "broken.jsonl": (b'{"text": \n', "cannot read"),
    "list.jsonl": (b"[1, 2]\n", "line 1 has none of the fields"),
    "fields.jsonl": (b'{"text": "a"}\n{"answer": "b"}\n', "line 2 has none of the fields tokens, completion and text"),
    "numbers.jsonl": (b'{"tokens": [1, "2"]}\n', "line 1: a prompt or output is neither text nor a list of token ids"),
    "damaged.ssd": (b"SSDSNAP\nnothing", "damaged.ssd"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_unusable_files_are_refused_before_the_target_is_loaded(tmp_path, model_folder, name):
    content, message = FAULTS[name]
    path = write(tmp_path / name, content)
    config = configure("rest", DrafterConfig(), {"path": str(path)})
    with pytest.raises(UserError, match=message) as problem:
        check_kind("rest", config, None, model_folder)
    assert "\n" not in str(problem.value)
    assert name in str(problem.value)


def test_a_snapshot_of_another_vocabulary_is_refused(tmp_path, model_folder):
    path = saved_snapshot(tmp_path / "corpus.ssd", [np.array([5, VOCAB], np.uint32)])
    with pytest.raises(UserError, match=f"holds the token id {VOCAB}"):
        check_kind("rest", configure("rest", DrafterConfig(), {"path": str(path)}), None, model_folder)


def test_a_folder_and_a_missing_path_are_refused(tmp_path, model_folder):
    with pytest.raises(UserError, match="Is a directory"):
        check_corpus(tmp_path, VOCAB)
    with pytest.raises(UserError, match="--drafter rest: it needs a corpus; give --drafter-option path=FILE"):
        check_kind("rest", DrafterConfig(), None, model_folder)
    (tmp_path / "code.txt").write_text(TEXT)
    with pytest.raises(UserError, match="text needs the target's tokenizer"):
        load_corpus(tmp_path / "code.txt", VOCAB, None, DrafterConfig())


def requests(temperature):
    rng = np.random.default_rng(1)
    return [
        Request(rng.integers(1, 60, 20).astype(np.uint32), SamplingParams(40, temperature, seed, ignore_eos=True))
        for seed in range(5)
    ]


@pytest.mark.parametrize("shape", ["path", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_outputs_in_the_corpus_are_drafted_and_nothing_is_learned(model, tmp_path, shape, temperature):
    asked, config = requests(temperature), replace(CONFIG, draft_shape=shape)
    plain = [each.tokens.tolist() for each in build_engine(model, config, NoDrafter()).generate(asked)]
    lines = [
        {"prompt": request.prompt.tolist(), "tokens": tokens}
        for request, tokens in list(zip(asked, plain, strict=True))[:3]
    ]
    (tmp_path / "earlier.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = configure("rest", DrafterConfig(draft_shape=shape), {"path": str(tmp_path / "earlier.jsonl")})
    drafter = build_drafter("rest", settings, TargetInfo.from_model(model, config))
    before = texts_of(drafter.corpus)
    sources = set()
    engine = build_engine(model, config, drafter)
    for _ in range(2):
        steps = []
        for request, tokens in zip(asked, plain, strict=True):
            [completion] = engine.generate(
                [request], lambda report: sources.update(s for each in report.results for s in each.sources.tolist())
            )
            assert completion.tokens.tolist() == tokens
            steps.append(completion.steps)
        # The last two requests are not in the corpus, even when they are repeated.
        assert max(steps[:3]) < 20 < min(steps[3:])
    assert DraftSource.REST in sources <= {DraftSource.REST, DraftSource.LOCAL}
    drafter.corpus.refresh()
    assert texts_of(drafter.corpus) == before
    engine.close()
