"""Training a head from the command, and the heads that ship with the package."""

import io
import json
import platform
import re
import sysconfig
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from engine.commands.options import TrainFlags
from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.drafters.build import check_weights
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.loader import load_config, load_model
from engine.models.shipped import SHIPPED_HEADS, SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Request, SamplingParams
from engine.training import data, run
from engine.training.command import train_head
from engine.training.kinds import KINDS
from ssd.config import DrafterConfig
from ssd.errors import UserError
from tests.engine.conftest import TEXT, make_folder
from tests.engine.models.test_families import DEEPSEEK

WINDOW = 32


def recipe(kind):
    changes = {"window": WINDOW, "batch_windows": 2, "draft_vocabulary": 200, "depth": 2, "num_layers": 1}
    return replace(KINDS[kind].recipe, total_tokens=8 * 2 * WINDOW, **changes)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "target"
    make_folder(folder, num_hidden_layers=3)
    (folder / "LICENSE.txt").write_text("the license")
    return folder


@pytest.fixture
def text_files(tmp_path):
    (tmp_path / "one.py").write_text(TEXT * 3)
    (tmp_path / "two.jsonl").write_text(
        "".join(json.dumps({"prompt": "def ", "completion": TEXT}) + "\n" for _ in range(2))
    )
    return tmp_path / "one.py", tmp_path / "two.jsonl"


def train(kind, target, tmp_path, data=(), own_recipe=None):
    """Train a head; return its folder and what is printed."""
    flags = TrainFlags(out=tmp_path / "out", target=target, data=data, work=tmp_path / "work")
    console = Console(file=io.StringIO())
    train_head(kind, flags, console, own_recipe or recipe(kind))
    return flags.out, console.file.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_the_written_folder_drafts_for_the_target(kind, target, text_files, tmp_path):
    out, printed = train(kind, target, tmp_path, text_files)
    config = EngineConfig(max_sequences=2, max_draft=2)
    info = TargetInfo.from_model(load_model(target), config, target)
    drafter = build_drafter(kind, DrafterConfig(max_draft=2), info, draft_models={kind: out})
    with closing(build_engine(info.model, config, drafter)) as engine:
        [completion] = engine.generate([Request(np.arange(1, 9, dtype=np.uint32), SamplingParams(16, ignore_eos=True))])
    assert completion.drafted > 0
    assert f"ssd-engine compare --model {target} --drafter {kind} --draft-model {out}\n" in printed
    assert re.search(r"about [1-5]\.\d\d tokens per step", printed)
    assert (out / "LICENSE.txt").read_text() == "the license"
    if kind == "draft-model":
        assert load_config(out) == replace(load_config(target), num_layers=1)


@pytest.mark.parametrize(
    "shape",
    [
        {"family": "mixtral", "num_local_experts": 4},
        {"family": "deepseek_v3", **DEEPSEEK, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
    ],
    ids=["experts", "latent attention"],
)
def test_heads_that_copy_a_layer_need_a_dense_target(shape, text_files, tmp_path):
    make_folder(tmp_path / "target", **shape)
    for kind in ("mtp", "eagle", "eagle3"):
        with pytest.raises(UserError, match=f"{kind} begins with a layer of its target, which may have neither"):
            train(kind, tmp_path / "target", tmp_path, text_files)
    out, _ = train("draft-model", tmp_path / "target", tmp_path, text_files)
    assert load_model(out).config.num_layers == 1


def test_a_draft_model_cannot_have_experts_where_its_config_has_none(text_files, tmp_path):
    shape = {**DEEPSEEK, "num_hidden_layers": 4, "first_k_dense_replace": 2}
    make_folder(tmp_path / "target", family="deepseek_v3", **shape)
    two_layers = replace(recipe("draft-model"), num_layers=2)
    with pytest.raises(UserError, match="whose first ones have no experts; train medusa"):
        train("draft-model", tmp_path / "target", tmp_path, text_files, two_layers)


def test_a_second_call_continues(target, text_files, tmp_path, monkeypatch):
    train("eagle3", target, tmp_path, text_files)
    monkeypatch.setattr(run, "_step", lambda *_: pytest.fail("trained again"))
    train("eagle3", target, tmp_path, text_files)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "give --data"),
        (("missing.txt",), "cannot read .*missing.txt"),
        (("short.txt",), "fewer than a window of 32; give more --data"),
        (("bad.jsonl",), "line 1"),
    ],
)
def test_unusable_text_is_refused(target, tmp_path, names, message):
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "bad.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(UserError, match=message):
        train("mtp", target, tmp_path, tuple(tmp_path / name for name in names))


def test_the_text_of_the_shipped_target_is_that_of_the_files_it_names(target, tmp_path):
    """Library files are named by their path; each is surrounded by the end token."""
    names = ["this.py", "json/__init__.py"]
    files = {"python": platform.python_version(), "train": names, "held_out": ["antigravity.py"]}
    (tmp_path / "files.json").write_text(json.dumps(files))
    tokenizer, root = Tokenizer(target), Path(sysconfig.get_path("stdlib"))
    tokens = data.library_tokens(tmp_path, tokenizer, 0)
    parts = [tokenizer.decode(part) for part in np.split(tokens, np.flatnonzero(tokens == 0))]
    assert [part for part in parts if part] == [(root / name).read_text() for name in names]
    assert (tokens[0], tokens[-1], tokens.dtype) == (0, 0, np.uint32)
    (tmp_path / "files.json").write_text(json.dumps(files | {"python": "3.0.0"}))
    with pytest.raises(UserError, match=r"standard library of Python 3\.0\.0, and this is Python"):
        data.library_tokens(tmp_path, tokenizer, 0)


MAX_BYTES = 28 * 2**20


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_head_with_a_card(kind):
    check_weights(kind, None, SHIPPED_MODEL)
    card = (SHIPPED_HEADS / kind / "README.md").read_text()
    assert f"--drafter {kind}" in card
    assert "tokens per step" in card
    assert (SHIPPED_HEADS / kind / "LICENSE.txt").exists()


def test_all_heads_together_are_small():
    assert sum(path.stat().st_size for path in SHIPPED_HEADS.rglob("*") if path.is_file()) <= MAX_BYTES
