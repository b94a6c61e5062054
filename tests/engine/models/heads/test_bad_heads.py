"""Folders without a head for the target are refused with one line, before memory is allocated."""

import shutil
from dataclasses import replace

import pytest
import torch

from engine.models.heads import formats
from engine.models.heads.formats import check_head, load_head, save_head
from ssd.errors import UserError
from tests.engine.damage import config, edit_json, removed, set_to, tensor
from tests.engine.models.heads import samples

MAKE = {"mtp": samples.mtp, "eagle": samples.eagle, "eagle3": samples.eagle3, "medusa": samples.medusa}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, model):
    root = tmp_path_factory.mktemp("heads")
    for kind, make in MAKE.items():
        save_head(make(model), root / kind, dtype=torch.float32)
    save_head(samples.eagle3(model, hidden_size=32), root / "eagle3-small", dtype=torch.float32)
    samples.as_deepseek(root / "mtp", root / "mtp-deepseek")
    samples.as_qwen(root / "mtp", root / "mtp-qwen")
    samples.as_speculators_eagle3(root / "eagle3", root / "eagle3-speculators")
    return root


def weights_of(folder):
    return next(folder.glob("*.safetensors"))


def pickled(value):
    def harm(folder):
        weights_of(folder).unlink()
        torch.save(value, folder / "pytorch_model.bin")

    return harm


class Code:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return print, ("unpickled",)


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NO_IDS = config(**{LAYER_IDS: None, "eagle_config": None})
LATENTS = tensor("model.mtp_layers.0.self_attn.kv_a_proj_with_mqa.weight", torch.ones(3, 3))
GATED = tensor("mtp.layers.0.self_attn.q_proj.weight", lambda given: given.repeat(2, 1))
IDS = torch.arange(200)


def text(folder):
    weights_of(folder).unlink()
    (folder / "pytorch_model.bin").write_text("weights")


BAD = [
    # For any kind.
    ("eagle", shutil.rmtree, "there is no folder"),
    ("eagle", removed("config.json"), "has no config.json"),
    ("eagle3", removed("model.safetensors"), "has no weights"),
    ("eagle3", tensor("midlayer.mlp.up_proj.weight", None), "lacks midlayer.mlp.up_proj.weight"),
    ("eagle", tensor("layers.0.more", torch.ones(3)), "has the tensor layers.0.more"),
    ("mtp", config(intermediate_size=100), "has shape .* describes"),
    ("eagle", tensor("fc.weight", lambda given: given.to(torch.int8)), "fc.weight .* stored as I8"),
    ("eagle3", tensor("fc.weight", set_to(5, float("nan"))), "fc.weight in .* not finite as float32"),
    ("eagle3", config(model_type="mamba"), "eagle3.*config.json names the architecture 'mamba', which .* not support"),
    ("eagle3", config(model_type="deepseek_v3"), "eagle3.*config.json describes a head with latent attention"),
    ("eagle", config(hidden_act="gelu"), "eagle.*config.json requires the activation 'gelu'"),
    ("eagle", config(vocab_size="many"), "vocab_size in .* must be a count, not 'many'"),
    ("mtp", config(hidden_size=None), "lacks the field hidden_size"),
    ("eagle", pickled({"fc.weight": Code()}), "pytorch_model.bin cannot be read .*Weights only"),
    ("eagle", pickled([torch.ones(2)]), "is not a dictionary of tensors"),
    ("eagle", text, "pytorch_model.bin cannot be read"),
    # MTP.
    ("eagle mtp", None, "has no MTP layer"),
    ("mtp", LATENTS, "has multi-head latent attention"),
    ("mtp-deepseek", tensor("model.layers.2.mlp.gate.weight", torch.ones(3, 3)), "has experts"),
    ("mtp-qwen", GATED, "q_proj.weight in .* has shape"),
    # EAGLE and EAGLE-3.
    ("medusa eagle", None, "no tensor fc.weight, so it does not have an EAGLE head"),
    ("eagle", config(num_hidden_layers=2), "give a head of one layer"),
    ("eagle eagle3", None, "so it does not have an EAGLE-3 head"),
    ("eagle3", config(num_hidden_layers=2), "give a head of one layer"),
    ("eagle3", config(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state is false"),
    ("eagle3-small", tensor("embed_tokens.weight", None), "lacks embed_tokens.weight"),
    ("eagle3", config(**{LAYER_IDS: [0, 1, 7]}), "names the layers 0, 1, 7 of the target, but .* from 0 to 2"),
    ("eagle3", config(**{LAYER_IDS: [1, 1, 2]}), "names the layers 1, 1, 2"),
    ("eagle3", NO_IDS, "which means the layers 2, 1, -1"),
    ("eagle3", config(**{LAYER_IDS: "all"}), "must be a list of layers"),
    ("eagle3", config(**{LAYER_IDS: [0, 2]}), "names 2 layers .* and 3 as"),
    ("eagle3-speculators", config(speculators_model_type="dflash"), "has a head of the kind 'dflash', not 'eagle3'"),
    ("eagle3-speculators", config(transformer_layer_config="llama"), "has no object transformer_layer_config"),
    # Draft vocabularies.
    ("eagle3", tensor("d2t", None), "lacks d2t"),
    ("eagle3", tensor("d2t", set_to(199, 101)), "maps row 199 to token 300, but .* 0 to 299"),
    ("eagle3", tensor("d2t", set_to(3, -4)), "maps row 3 to token -1"),
    ("eagle3", tensor("d2t", lambda given: given + IDS), "d2t must hold offsets from the row's number"),
    ("eagle3", tensor("d2t", lambda given: given - IDS), "several rows to one token"),
    ("eagle3", tensor("t2d", lambda given: ~given), "d2t and t2d in .* name different tokens"),
    ("eagle3", tensor("t2d", lambda given: given[:-1]), "name different tokens"),
    ("eagle3", tensor("d2t", lambda given: given.float()), "not as integers"),
    ("eagle3", tensor("d2t", lambda given: given[:-1]), r"shape \(199,\), but needs 200"),
    # Medusa.
    ("eagle medusa", None, "so it does not have Medusa heads"),
    ("medusa", config(medusa_num_heads=0), "describes 0 Medusa heads"),
    ("medusa", config(medusa_num_heads=4), r"lacks 3\.0\.linear\.bias and 2 more"),
]
"""Folder (and kind, if it is not that of the folder), what is done to it, if anything, and the reason."""


@pytest.mark.parametrize(("case", "harm", "message"), BAD)
def test_a_bad_folder_is_refused_with_a_reason(tmp_path, folders, model, case, harm, message):
    name, *kind = case.split()
    folder = shutil.copytree(folders / name, tmp_path / name)
    if harm is not None:
        harm(folder)
    with pytest.raises(UserError, match=message) as refusal:
        load_head(kind[0] if kind else name.split("-")[0], folder, model.config)
    assert "\n" not in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize("kind", MAKE)
def test_a_head_for_another_target_is_refused_without_allocation(folders, model, model_folder, kind, monkeypatch):
    monkeypatch.setattr(formats, "allocate_weights", lambda *_: pytest.fail("weights were allocated"))
    check_head(kind, folders / kind, model.config)
    for change in ({"hidden_size": 96, "head_dim": 16}, {"vocab_size": 310}):
        with pytest.raises(UserError, match=r"size 64 and 300 tokens, but this target has hidden size .* for it"):
            check_head(kind, folders / kind, replace(model.config, **change))
    reason = "has no MTP layer" if kind == "mtp" else "is the target's own folder"
    with pytest.raises(UserError, match=reason):
        check_head(kind, model_folder, model.config, target_folder=model_folder)


def test_a_medusa_head_whose_configuration_has_no_sizes_is_refused_by_its_shapes(tmp_path, folders, model):
    shutil.copytree(folders / "medusa", tmp_path / "medusa")
    edit_json(tmp_path / "medusa" / "config.json", hidden_size=None, vocab_size=None)
    load_head("medusa", tmp_path / "medusa", model.config)
    with pytest.raises(UserError, match="has shape"):
        check_head("medusa", tmp_path / "medusa", replace(model.config, vocab_size=310))


def test_a_deepseek_layer_for_a_target_of_another_length_is_refused(folders, model):
    check_head("mtp", folders / "mtp-deepseek", model.config)
    with pytest.raises(UserError, match=r"is model\.layers\.2, but .* 5 layers it must be model\.layers\.5"):
        check_head("mtp", folders / "mtp-deepseek", replace(model.config, num_layers=5))


def test_an_unknown_kind_is_refused(folders, model):
    with pytest.raises(UserError, match="'dflash' is not a kind of draft head; give one of mtp, eagle, eagle3, medusa"):
        check_head("dflash", folders / "eagle", model.config)


def test_heads_that_no_published_format_describes_are_not_written(tmp_path, model):
    with pytest.raises(ValueError, match="replaces the first embedding"):
        save_head(samples.mtp(model, zeroes_first=False), tmp_path)
