"""Fixtures: small models in the format of Hugging Face, with random weights and their own vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from engine.drafters import guard
from engine.models.heads.formats import save_head
from engine.models.loader import load_model
from tests.engine.drafters.heads import make_head
from tests.engine.drafters.kinds import saved_snapshot

VOCAB = 300
TEXT = "def add(left, right):\n    return left + right\n\nclass Pair:\n    pass\n" * 20


def make_folder(folder, *, seed=0, max_shard_size="5GB", family="llama", vary=0.0, **shape):
    """Write a folder with transformers; `shape` overrides fields of the config.

    vary: standard deviation of noise on norms and biases, which are otherwise ones and zeros.
    """
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "initializer_range": 0.3,  # large, so that rounding does not change the order of logits
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**fields, **shape})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 and vary:
                parameter += vary * torch.randn_like(parameter)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


@pytest.fixture(autouse=True)
def no_drafter_failed(caplog):
    """Fail a test in which a drafter fails, because the engine continues without drafts.

    Tests of failing drafters clear the log.
    """
    yield
    reports = [each for each in caplog.get_records("call") if each.name == guard.__name__]
    assert not reports, reports[0].getMessage()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_folder(folder)
    return folder


@pytest.fixture(scope="session")
def model(model_folder):
    return load_model(model_folder)


def make_draft_folders(model, folder, heads=("mtp", "eagle", "eagle3", "medusa")):
    """Write folders of weights for a model, with random values; return them by kind of drafter."""
    for kind in heads:
        save_head(make_head(kind, model), folder / kind)
    make_folder(folder / "draft-model", seed=1, hidden_size=32, num_hidden_layers=1)
    return {kind: folder / kind for kind in ("draft-model", *heads)}


@pytest.fixture(scope="session")
def draft_folders(model, tmp_path_factory):
    """Folders of weights for `model`; see `make_draft_folders`."""
    return make_draft_folders(model, tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory):
    """A snapshot with token ids from 1 to 7."""
    requests = np.random.default_rng(3).integers(1, 8, (20, 50))
    return saved_snapshot(tmp_path_factory.mktemp("corpora") / "corpus.ssd", requests)


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory):
    """A model with a head dimension for which FlashInfer has kernels."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    make_folder(folder, head_dim=64)
    return folder
