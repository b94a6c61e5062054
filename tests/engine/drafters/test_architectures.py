"""With every drafter, greedy outputs of every kind of architecture are those of plain decoding."""

from contextlib import closing
from copy import deepcopy

import pytest

from engine.config import EngineConfig
from engine.drafters.autoregressive import AutoregressiveDrafter
from engine.drafters.draft_model import ModelHead
from engine.drafters.medusa import MedusaDrafter
from engine.drafters.registry import KINDS, build_drafter
from engine.drafters.sources import DraftSource
from engine.engine import build_engine
from engine.models.loader import load_model
from engine.models.packed import pack, quantize_int8
from ssd.baselines.none import NoDrafter
from tests.engine.conftest import make_folder
from tests.engine.drafters.heads import make_head
from tests.engine.drafters.kinds import EMBEDDED, config_of, target_of
from tests.engine.models.test_families import DEEPSEEK
from tests.engine.test_core import outputs, requests

ARCHITECTURES = {
    "mixtral": {"family": "mixtral", "num_local_experts": 8},
    "qwen3_moe": {"family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    "deepseek_v2": {"family": "deepseek_v2", **DEEPSEEK, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {"family": "deepseek_v3", **DEEPSEEK, "first_k_dense_replace": 1},
}
DRAFTERS = ["ssd", "lookahead", *(name for name, kind in KINDS.items() if kind.runs_model)]
CASES = [
    (family, kind, shape)
    for place, kind in enumerate(DRAFTERS)
    for family, shape in (
        (("mixtral", "qwen3_moe")[place % 2], ("path", "tree")[place // 2 % 2]),
        (("deepseek_v2", "deepseek_v3")[place % 2], ("tree", "path")[place // 2 % 2]),
    )
]
"""Each drafter with a mixture of experts and with latent attention, with paths in one case and trees in the other."""
REQUESTS = requests(4, max_tokens=20)


@pytest.fixture(scope="module")
def target(request, tmp_path_factory):
    """A model that is not packed, and its outputs without drafts."""
    folder = tmp_path_factory.mktemp("architectures") / request.param
    make_folder(folder, **ARCHITECTURES[request.param])
    model = load_model(folder)
    return model, outputs(build_engine(pack(deepcopy(model)), config_for("path"), NoDrafter()), REQUESTS)


def config_for(shape):
    """Paths run in the executor of fixed shapes, trees in the eager one."""
    in_flight = 1 if shape == "path" else 0
    return EngineConfig(max_sequences=3, max_step_tokens=64, max_draft=5, draft_shape=shape, in_flight=in_flight)


def drafter_of(kind, model, shape, corpus_file):
    """A drafter without weights, or one with random ones."""
    if kind in EMBEDDED:
        return build_drafter(kind, config_of(kind, corpus_file, draft_shape=shape), target_of(model.config))
    settings = {"depth": 4, "has_trees": shape == "tree", "source": DraftSource[kind.replace("-", "_").upper()]}
    if kind == "medusa":
        return MedusaDrafter(make_head(kind, model), **settings)
    if kind == "self-int8":
        head = ModelHead(quantize_int8(deepcopy(model)), shares_target_cache=True)
        head.attach(model)
    else:
        head = make_head(kind, model)
    return AutoregressiveDrafter(head, **settings)


@pytest.mark.parametrize(("target", "kind", "shape"), CASES, indirect=["target"])
def test_greedy_outputs_equal_plain_decoding(target, corpus_file, kind, shape):
    model, expected = target
    drafter = drafter_of(kind, model, shape, corpus_file)
    with closing(build_engine(pack(deepcopy(model)), config_for(shape), drafter, has_budget=False)) as engine:
        assert outputs(engine, REQUESTS) == expected
        again = engine.generate(REQUESTS)
    assert [completion.tokens.tolist() for completion in again] == expected
    if kind in ("ssd", "self-int8"):
        assert sum(completion.accepted for completion in again) > 20
