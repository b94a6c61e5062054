"""Compare the FlashInfer backend with plain PyTorch: attention, models, engines.

All tests run on the CPU with a slow twin of the library and, marked `gpu`, on a GPU with the library itself.
"""

from contextlib import closing

import numpy as np
import pytest
import torch

from engine.attention.flashinfer import FlashInferAttention, FusedOps
from engine.attention.plain import PlainAttention
from engine.config import EngineConfig
from engine.engine import build_engine
from engine.executor.runner import Runner
from engine.models.config import ModelConfig
from engine.models.layers import PLAIN
from engine.models.loader import load_model
from engine.speculation.draft_tree import DraftTree
from ssd.config import DrafterConfig
from ssd.drafter import SuffixDrafter
from tests.engine.attention.test_tree_attention import requests
from tests.engine.conftest import VOCAB, make_folder
from tests.engine.flashinfer_twin import LIBRARIES, library_of
from tests.engine.forward import PAGE_SIZE, sequence_of
from tests.engine.models.test_families import FAMILIES
from tests.engine.steps import batch_of
from tests.engine.test_gpu_engine import differences, references
from tests.engine.trees import RandomTrees, random_tree

PAGES = 64


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request):
    with library_of(request.param) as there:
        yield there


def config_of(heads, kv_heads):
    return ModelConfig(10, 64, 64, num_layers=2, num_heads=heads, num_kv_heads=kv_heads, head_dim=64, max_positions=512)


def random_batches(rng, kinds):
    """Steps of four sequences on shuffled pages."""
    pages = rng.permutation(PAGES).reshape(4, -1)
    computed = np.zeros(4, int)
    for _ in range(3):
        sequences = []
        for index in range(4):
            # Only a prompt or a tree may begin a sequence; a tree may have no context.
            first = [kind for kind in kinds if kind in ("prompt", "tree")] or ["prompt"]
            kind = rng.choice(first if computed[index] == 0 else kinds)
            scheduled = rng.integers(1, 50) if kind == "prompt" else 1
            draft = rng.integers(0, 9, rng.integers(1, 12)) if kind == "path" else []
            tree = None
            if kind == "tree":
                scheduled = rng.integers(1, 4)
                draft, parents = random_tree(rng, rng.integers(0, 9, 12), 12, 9)
                tree = DraftTree(np.array(parents, np.int32)) if len(draft) else None
            tokens = np.zeros(computed[index] + scheduled)
            sequence = sequence_of(tokens, pages[index].tolist(), computed=computed[index], draft=draft)
            sequence.tree = tree
            sequences.append(sequence)
        yield batch_of(sequences, PAGE_SIZE)
        computed += [sequence.scheduled for sequence in sequences]


def compare(library, seed, *, sharing=(4, 2), kinds=("prompt", "single", "path", "tree")):
    """Run random steps on both backends and compare their results."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    config = config_of(*sharing)
    tested = FlashInferAttention(config, PAGES, PAGE_SIZE, library.dtype, library.device)
    plain = PlainAttention(config, PAGES, PAGE_SIZE, torch.float32, library.device)
    for batch in random_batches(rng, kinds):
        attends = tested.begin(batch), plain.begin(batch)
        for layer in range(config.num_layers):
            heads = torch.randn(len(batch.tokens), sharing[0] + 2 * sharing[1], 64, generator=generator)
            heads = heads.to(library.device, library.dtype)
            # Views of one tensor, as in a model.
            parts = heads.split((sharing[0], sharing[1], sharing[1]), dim=1)
            got = attends[0](layer, *parts).float()
            wide = [part.float() for part in parts]
            torch.testing.assert_close(got, attends[1](layer, *wide), rtol=library.tolerance, atol=library.tolerance)


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        *((seed, {}) for seed in range(2)),
        *((5, {"kinds": kinds}) for kinds in (("single",), ("path",), ("tree",), ("single", "tree"))),
        *((6, {"sharing": sharing}) for sharing in ((2, 2), (8, 2), (7, 1))),
    ],
    ids=str,
)
def test_attention_of_ragged_steps(library, seed, options):
    compare(library, seed, **options)


@pytest.mark.parametrize("name", ["llama 3.1", "llama with biases", "qwen 2.5, untied, yarn", "qwen 3 with biases"])
def test_logits_of_dense_families(library, tmp_path, name):
    """Compare a prompt in two chunks and a draft tree with plain operations in float32 on the same weights."""
    make_folder(tmp_path, vary=0.3, initializer_range=0.05, hidden_size=128, **{**FAMILIES[name], "head_dim": 64})
    model = load_model(tmp_path, dtype=library.dtype, device=library.device)
    reference = load_model(tmp_path, device=library.device)
    rng = np.random.default_rng(0)
    text = rng.integers(1, VOCAB, 60)
    draft, parents = random_tree(rng, text, 12, VOCAB)
    backends = (
        (model, FlashInferAttention, library.dtype, FusedOps()),
        (reference, PlainAttention, torch.float32, PLAIN),
    )
    runners = [
        Runner(each, attention(each.config, 8, PAGE_SIZE, dtype, library.device), library.device, ops)
        for each, attention, dtype, ops in backends
    ]
    for end, computed, drafted in ((40, 0, False), (60, 40, True)):
        logits = []
        for runner in runners:
            sequence = sequence_of(text[:end], range(8), computed=computed, draft=draft if drafted else ())
            sequence.tree = DraftTree(np.array(parents, np.int32)) if drafted else None
            logits.append(runner.forward(batch_of([sequence], PAGE_SIZE)))
        got, expected = logits
        assert torch.cosine_similarity(got, expected, dim=-1).min() > 1 - library.tolerance / 10
        assert (got - expected).abs().max() < 5 * library.tolerance * expected.abs().max()


def test_trees_do_not_change_outputs(library, wide_folder):
    model = load_model(wide_folder, dtype=library.dtype, device=library.device)
    config = EngineConfig(max_sequences=6, max_step_tokens=256, max_draft=9, kv_memory_mib=16, draft_shape="tree")
    submitted = requests(3, max_tokens=6)
    expected = references(model, config, "flashinfer", submitted)
    settings = DrafterConfig(capacity=10_000, draft_shape="tree", max_draft=9, cost=0.001)
    for drafter in (RandomTrees(submitted, [one.tokens for one in expected], VOCAB), SuffixDrafter(settings)):
        with closing(build_engine(model, config, drafter, attention="flashinfer")) as engine:
            got = [completion.tokens.tolist() for completion in engine.generate(submitted)]
        found = differences(got, expected)
        assert all(difference.is_near_tie for difference in found), found
        assert not found or library.dtype != torch.float32
