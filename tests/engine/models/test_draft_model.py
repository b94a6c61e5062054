"""Draft models must have the target's tokens; their vocabularies may be padded to another size."""

import json
import shutil

import pytest
import torch

from engine.models.draft_model import check_draft_model, fit_vocabulary, load_draft_model
from engine.models.loader import load_model
from ssd.errors import UserError
from tests.engine.conftest import VOCAB, make_folder


def copy(folder, to, **shape):
    """Write a model of another size with the tokenizer of `folder`."""
    make_folder(to, num_hidden_layers=1, **shape)
    shutil.copy(folder / "tokenizer.json", to / "tokenizer.json")
    return to


def swap_tokens(folder, left, right):
    fields = json.loads((folder / "tokenizer.json").read_text())
    vocab = fields["model"]["vocab"]
    vocab[left], vocab[right] = vocab[right], vocab[left]
    (folder / "tokenizer.json").write_text(json.dumps(fields))


def test_a_model_with_the_same_tokens_is_accepted(tmp_path, model_folder):
    draft = copy(model_folder, tmp_path / "draft")
    assert check_draft_model(draft, model_folder).num_layers == 1
    assert load_draft_model(draft, model_folder).config.num_layers == 1


def test_without_tokenizers_sizes_are_compared(tmp_path, model_folder):
    draft = copy(model_folder, tmp_path / "draft")
    (draft / "tokenizer.json").unlink()
    check_draft_model(draft, model_folder)
    other = copy(model_folder, tmp_path / "other", vocab_size=VOCAB + 8)
    (other / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="vocabulary of 308, but the target has one of 300"):
        check_draft_model(other, model_folder)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [VOCAB, VOCAB + 20])
def test_padding_may_differ(tmp_path, model_folder, size, tied):
    """Logits of common tokens stay the same."""
    target = copy(model_folder, tmp_path / "target", vocab_size=VOCAB + 10)
    draft = copy(model_folder, tmp_path / "draft", vocab_size=size, tie_word_embeddings=tied)
    model, plain = load_draft_model(draft, target), load_model(draft)
    assert model.config.vocab_size == VOCAB + 10
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert model.logits(hidden).shape == (3, VOCAB + 10)
    kept = min(size, VOCAB + 10)
    torch.testing.assert_close(model.logits(hidden)[:, :kept], plain.logits(hidden)[:, :kept])
    assert torch.equal(model.embedding(torch.arange(VOCAB)), plain.embedding(torch.arange(VOCAB)))
    assert not model.embedding(torch.arange(kept, VOCAB + 10)).any()
    assert (model.lm_head.weight is model.embedding.weight) == tied


def test_a_model_of_the_same_size_stays_as_it_is(model):
    assert fit_vocabulary(model, VOCAB) is model


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(tmp_path, model_folder):
    draft = copy(model_folder, tmp_path / "draft", vocab_size=VOCAB - 50)
    with pytest.raises(UserError, match="give --draft-model a model with the target's tokenizer"):
        check_draft_model(draft, model_folder)


def test_other_tokens_are_refused_by_the_first_that_differs(tmp_path, model_folder):
    draft = copy(model_folder, tmp_path / "draft")
    swap_tokens(draft, "!", '"')
    with pytest.raises(UserError, match=r"token 1 is '\"' there and '!' in .*tiny; give") as refusal:
        check_draft_model(draft, model_folder)
    assert "\n" not in str(refusal.value)


def test_the_target_itself_is_refused(tmp_path, model_folder):
    (tmp_path / "link").symlink_to(model_folder)
    for folder in (model_folder, tmp_path / "link"):
        with pytest.raises(UserError, match="is the target itself"):
            check_draft_model(folder, model_folder)


def test_a_folder_without_a_model_is_refused(tmp_path, model_folder):
    with pytest.raises(UserError, match="no model folder"):
        check_draft_model(tmp_path / "missing", model_folder)
