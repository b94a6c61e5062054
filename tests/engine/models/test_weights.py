"""Overwritten weights give the logits of a model that is loaded with them; weights that do not fit change nothing."""

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.heads.formats import save_head
from engine.models.loader import load_model
from engine.models.lora.format import check_adapters
from engine.models.lora.pool import AdapterPool
from engine.models.packed import pack, quantize_int8
from engine.models.sharding import Shard, load_shard
from engine.models.weights import check_weights, overwrite_weights
from ssd.errors import UserError
from tests.engine.conftest import make_folder
from tests.engine.drafters.heads import make_head
from tests.engine.forward import prompt_logits
from tests.engine.lora_folders import write_adapter
from tests.engine.models.quantized_formats import FORMATS, quantize_folder
from tests.engine.models.test_families import DEEPSEEK
from tests.engine.models.test_lora import entries, run

TOKENS = np.random.default_rng(0).integers(0, 300, 40).astype(np.uint32)
FAMILIES = {
    "llama": {},
    "qwen2": {"family": "qwen2", "tie_word_embeddings": False, "vary": 0.3},
    "qwen3": {"family": "qwen3", "vary": 0.3},
    "mixtral": {"family": "mixtral", "num_local_experts": 4},
    "deepseek_v3": {"family": "deepseek_v3", **DEEPSEEK, "first_k_dense_replace": 1},
}
FORMS = {"plain": lambda model: model, "packed": pack, "int8": quantize_int8}
FILE = "model.safetensors"


@pytest.fixture(scope="module", params=FAMILIES)
def folders(request, tmp_path_factory):
    """Folders of two models of one shape."""
    parent = tmp_path_factory.mktemp(request.param)
    for seed in (0, 1):
        make_folder(parent / str(seed), seed=seed, **FAMILIES[request.param])
    return parent / "0", parent / "1"


@pytest.fixture(scope="module")
def weights(model_folder):
    """Weights that fit the model of `model_folder`."""
    return {name: tensor + 0.01 for name, tensor in load_file(model_folder / FILE).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_overwritten_weights_are_those_of_a_model_loaded_with_them(folders, form, dtype):
    """Tensors keep their addresses."""
    old, new = folders
    model = FORMS[form](load_model(old, dtype=dtype))
    before, addresses = prompt_logits(model, TOKENS), addresses_of(model)
    overwrite_weights(model, check_weights(load_model(old, dtype=dtype), new))
    expected = prompt_logits(FORMS[form](load_model(new, dtype=dtype)), TOKENS)
    assert torch.equal(prompt_logits(model, TOKENS), expected)
    assert not torch.equal(before, expected)
    assert addresses_of(model) == addresses


def addresses_of(model):
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_adapters_stay_attached(folders, tmp_path, form):
    old, new = folders
    write_adapter(tmp_path / "a", old)
    logits = []
    for folder in folders:
        model = FORMS[form](load_model(folder))
        pool = AdapterPool(model, check_adapters({"a": tmp_path / "a"}, model.config))
        if folder is old:
            overwrite_weights(model, check_weights(model, new))
        logits.append(run(model, entries([3, 4], [None, "a"]), pool))
    assert torch.equal(*logits)


def test_a_state_dict_a_file_and_shards_are_equal(model_folder, weights, tmp_path):
    save_file(weights, tmp_path / FILE)
    make_folder(tmp_path / "shards", seed=4, max_shard_size="50KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    sources = {
        "state dict": {name: tensor.double() for name, tensor in weights.items()},
        "file": tmp_path / FILE,
        "folder": str(tmp_path),
        "shards": tmp_path / "shards",
    }
    logits = {}
    for name, source in sources.items():
        model = load_model(model_folder)
        overwrite_weights(model, check_weights(model, source))
        logits[name] = prompt_logits(model, TOKENS)
    assert torch.equal(logits["state dict"], logits["file"])
    assert torch.equal(logits["folder"], logits["file"])
    assert torch.equal(logits["shards"], prompt_logits(load_model(tmp_path / "shards"), TOKENS))


def test_tensors_that_the_decoder_does_not_read_are_accepted(model_folder, model, weights, tmp_path):
    """A copy of the tied output projection, and MTP layers of all forms."""
    save_head(make_head("mtp", model), tmp_path)
    tensors = weights | load_file(tmp_path / FILE)
    tensors |= {"model.layers.2.eh_proj.weight": torch.ones(1), "model.layers.2.enorm.weight": torch.ones(1)}
    assert "lm_head.weight" in tensors
    assert "model.mtp_layers.0.input_proj.weight" in tensors
    check_weights(load_model(model_folder), tensors)
    del tensors["model.layers.2.eh_proj.weight"]
    with pytest.raises(UserError, match=r"model.layers.2.enorm.weight, which config.json does not describe"):
        check_weights(load_model(model_folder), tensors)


NORM, PROJECTION = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
EMBEDDING, HEAD, NANS = "model.embed_tokens.weight", "lm_head.weight", torch.full((300, 64), torch.nan)
UNFIT = [
    ({NORM: None}, r"the state dict lacks model.norm.weight; give all tensors"),
    ({NORM: None, PROJECTION: None}, r"lacks model.layers.1.\S+ and 1 more tensors; give all"),
    ({"lora.weight": torch.ones(2)}, r"has the tensor lora.weight, which config.json does not describe"),
    ({PROJECTION: torch.ones(64, 32)}, r"q_proj.weight in the state dict has shape \(64, 32\), but"),
    ({NORM: torch.ones(64, dtype=torch.int8)}, r"norm.weight in the state dict is stored as int8; "),
    ({NORM: np.ones(64)}, r"model.norm.weight in the state dict is a ndarray, not a tensor"),
    ({NORM: torch.full((64,), torch.nan)}, r"norm.weight has values that are not finite as float32, so the"),
    ({EMBEDDING: NANS, HEAD: NANS}, r"embed_tokens.weight has values that are not finite as float32, so the"),
    ({HEAD: torch.ones(300, 64)}, r"lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings"),
    ({NORM: torch.full((64,), 1e300, dtype=torch.float64)}, r"norm.weight has values that are not finite as float32"),
]


@pytest.mark.parametrize(("change", "message"), UNFIT, ids=[message for _, message in UNFIT])
def test_weights_that_do_not_fit_are_refused(model, weights, change, message):
    tensors = {name: tensor for name, tensor in {**weights, **change}.items() if tensor is not None}
    with pytest.raises(UserError, match=message):
        check_weights(model, tensors)


def test_damaged_files_are_refused(model, weights, tmp_path):
    save_file(weights, tmp_path / FILE)
    data = (tmp_path / FILE).read_bytes()
    for size in (0, 5, 200, len(data) // 2, len(data) - 1):
        (tmp_path / FILE).write_bytes(data[:size])
        for source in (tmp_path, tmp_path / FILE):
            with pytest.raises(UserError, match=r"model.safetensors is damaged or cut short"):
                check_weights(model, source)


def test_paths_that_cannot_be_read_are_refused(model, tmp_path, monkeypatch):
    (tmp_path / "model.bin").touch()
    for name in ("absent.safetensors", "model.bin", "\x00.safetensors", "\ud800.safetensors", "x" * 5000):
        with pytest.raises(UserError, match=r"is neither a folder nor a .safetensors file that can be read; give one"):
            check_weights(model, str(tmp_path / name))
    with pytest.raises(UserError, match=r"has no model.safetensors; only safetensors weights are read"):
        check_weights(model, tmp_path)

    def exists(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", exists)
    with pytest.raises(UserError, match=r"cannot be read \(Permission denied\); change its permissions"):
        check_weights(model, tmp_path)


def test_parts_of_a_divided_model_and_quantized_weights_are_refused(model_folder, model, tmp_path, weights):
    with pytest.raises(UserError, match="that --tensor-parallel divides cannot be changed while it runs"):
        check_weights(load_shard(model_folder, Shard(0, 2)), weights)
    quantize_folder(shutil.copytree(model_folder, tmp_path / "model"), FORMATS["int8, channels"])
    with pytest.raises(UserError, match=r"is stored as I8; this engine reads only float weights"):
        check_weights(model, tmp_path / "model")
