"""Mixtures of experts and latent attention on several ranks, each a real process, with every drafter."""

from dataclasses import replace

import numpy as np
import pytest

from engine.commands.launch import load
from engine.drafters.registry import KINDS
from engine.models.loader import load_model
from engine.scheduling.request import Request, SamplingParams
from tests.engine.conftest import VOCAB, make_draft_folders, make_folder
from tests.engine.executor.ranks.test_ranks import complete, options_of, tokens
from tests.engine.models.heads.test_deepseek import make_published

MAKERS = {
    "mixtral": lambda folder: make_folder(folder, family="mixtral", num_local_experts=8),
    "deepseek_v3": make_published,
}
DRAFTERS = [kind for kind in KINDS if kind not in ("none", "ssd-remote", "self-int8")]
"""Kinds of drafters that run on a divided model and need no sidecar."""
HEADS = ("mtp", "eagle", "eagle3", "medusa")
PATTERN = np.random.default_rng(2).integers(1, VOCAB, 9).astype(np.uint32)


@pytest.fixture(scope="module")
def case(request, tmp_path_factory, corpus_file):
    """Options for one process with all drafters, and the outputs of plain decoding."""
    folder = tmp_path_factory.mktemp(request.param)
    MAKERS[request.param](folder)
    kinds = [kind for kind in HEADS if kind != "mtp" or request.param != "deepseek_v3"]  # that target has its own
    heads = make_draft_folders(load_model(folder), tmp_path_factory.mktemp("heads"), kinds)
    alone = options_of(folder)
    expected = tokens(complete(load(alone), alone, requests()))
    options = options_of(folder, drafter="+".join(DRAFTERS), **heads)
    return replace(options, drafter_options={"path": str(corpus_file), "depth": "3"}), expected


def requests(*kinds):
    """A greedy and a sampled request that only drafters of some kinds draft for."""
    return [
        Request(
            np.tile(PATTERN, 3),
            SamplingParams(max_tokens=12, temperature=temperature, seed=7, ignore_eos=True),
            drafters=frozenset(kinds),
        )
        for temperature in (0.0, 0.7)
    ]


@pytest.mark.parametrize(("case", "shape"), [("mixtral", "path"), ("deepseek_v3", "tree")], indirect=["case"])
def test_outputs_equal_those_of_one_process(case, shape):
    options, expected = case
    divided = replace(options, tensor_parallel=2, draft_shape=shape)
    model = load(divided)
    try:
        completions = complete(model, divided, [request for kind in DRAFTERS for request in requests(kind)])
    finally:
        model.group.close()
    assert tokens(completions) == expected * len(DRAFTERS)
    assert all(each.drafted for each in completions)
