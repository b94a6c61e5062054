"""Plain attention and latent attention equal obvious twins."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.backend import make_attention
from engine.attention.plain import PlainAttention, are_prompts
from engine.executor.runner import Runner
from engine.models import latent_attention
from engine.models.config import LatentConfig
from engine.models.latent_attention import Expansion
from engine.models.loader import load_model
from engine.speculation.draft_tree import DraftTree
from tests.engine.conftest import VOCAB, make_folder
from tests.engine.executor.kernels.test_sample import Memory
from tests.engine.forward import PAGE_SIZE, new_runner, prompt_logits, sequence_of
from tests.engine.models.test_families import DEEPSEEK, TOKENS, transformers_logits
from tests.engine.models.test_rope import rope
from tests.engine.steps import batch_of

TEXT = np.random.default_rng(0).integers(1, VOCAB, 400).astype(np.uint32)


@pytest.fixture(scope="module")
def reference(model):
    return prompt_logits(model, TEXT)


def close(left, right):
    return bool((left - right).abs().max() < 2e-4)


@settings(max_examples=30)
@given(st.data())
def test_logits_do_not_depend_on_how_a_text_is_divided_into_steps(model, reference, data):
    """Prompt chunks, single tokens, right and wrong drafts on shuffled pages, compared with one pass."""
    size = data.draw(st.integers(2, len(TEXT)), "size")
    pages = data.draw(st.permutations(range(32)), "pages")
    runner = new_runner(model, 32)
    computed = 0
    while computed < size:
        scheduled = data.draw(st.integers(1, min(size - computed, 150)), "scheduled")
        end = computed + scheduled
        right = TEXT[end : min(size, end + data.draw(st.integers(0, 5), "right"))]
        wrong = data.draw(st.lists(st.integers(1, VOCAB - 1), max_size=4), "wrong")
        sequence = sequence_of(
            TEXT[:end], pages, computed=computed, scheduled=scheduled, draft=[*right.tolist(), *wrong]
        )
        logits = runner.forward(batch_of([sequence], PAGE_SIZE))
        assert close(logits[: 1 + len(right)], reference[end - 1 : end + len(right)])
        computed = end + len(right)


def test_sequences_of_a_batch_are_independent(model, reference):
    runner = new_runner(model)
    lengths = [1, 17, 130, 128, 127, 300]
    sequences = [
        sequence_of(TEXT[:length], range(20 * index, 20 * index + 20), draft=TEXT[length : length + index % 3])
        for index, length in enumerate(lengths)
    ]
    batch = batch_of(sequences, PAGE_SIZE)
    logits = runner.forward(batch)
    for index, length in enumerate(lengths):
        own = logits[batch.logit_offsets[index] : batch.logit_offsets[index + 1]]
        assert close(own, reference[length - 1 : length + index % 3])


def test_slots_before_the_first_are_not_attended_to(model):
    config = model.config
    attention = PlainAttention(config, 4, PAGE_SIZE, torch.float32, "cpu", first_slot=1)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(20, heads, config.head_dim, generator=generator) for heads in (4, 2, 2))
    pages = [2, 0]
    keys, values = attention.pages
    keys[0, 2, 0] = values[0, 2, 0] = 9.0
    steps = (sequence_of(TEXT[:12], pages, computed=1), sequence_of(TEXT[:20], pages, computed=12))
    attended = []
    for sequence, rows in zip(steps, (slice(1, 12), slice(12, 20)), strict=True):
        attend = attention.begin(batch_of([sequence], PAGE_SIZE))
        attended.append(attend(0, query[rows], key[rows], value[rows]).clone())
    heads = (part[1:].transpose(0, 1) for part in (query, key, value))
    expected = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(0, 1)
    torch.testing.assert_close(torch.cat(attended), expected)


YARN = rope("yarn", 500.0, 4.0, 128, mscale=0.7, mscale_all_dim=1.0)
SHAPES = {
    "v2": {"family": "deepseek_v2", **DEEPSEEK, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    "v3": {"family": "deepseek_v3", **DEEPSEEK, "first_k_dense_replace": 1},
    "v3, yarn": {"family": "deepseek_v3", **DEEPSEEK, "first_k_dense_replace": 1, "rope_parameters": YARN},
}
CLOSE = 1e-4


@pytest.fixture(scope="module", params=SHAPES)
def case(request, tmp_path_factory):
    """A model, and transformers' logits of a text."""
    folder = tmp_path_factory.mktemp("latent")
    reference = make_folder(folder, vary=0.3, **SHAPES[request.param])
    return load_model(folder), transformers_logits(reference)


def latent_runner(model, *, expands):
    """A runner with an empty cache that runs prompts in the expanded form or all rows in the absorbed one."""
    arguments = (model.config, 64, PAGE_SIZE, torch.float32, "cpu")
    return Runner(model, make_attention("plain", *arguments) if expands else PlainAttention(*arguments))


def step(runner, *entries):
    return runner.forward(batch_of(entries, PAGE_SIZE))


@pytest.mark.parametrize(
    ("expands", "workspace"),
    [(True, None), (True, 150_000), (True, 1), (False, None)],
    ids=["expanded", "in parts", "one head and query at a time", "absorbed"],
)
def test_prompts_in_chunks_give_the_logits_of_transformers(case, monkeypatch, expands, workspace):
    """Chunks are drafts here, so that all their logits are computed. The last chunks are too short to be expanded."""
    model, expected = case
    if workspace is not None:
        monkeypatch.setattr(latent_attention, "WORKSPACE_BYTES", workspace)
    runner, tokens = latent_runner(model, expands=expands), TOKENS.numpy()
    for first, end in ((0, 150), (150, 390), (390, 399), (399, 400)):
        entry = sequence_of(tokens[: first + 1], range(32), computed=first, draft=tokens[first + 1 : end])
        assert (step(runner, entry) - expected[first:end]).abs().max() < CLOSE


def test_prompts_and_drafts_share_a_step(case):
    """The first sequence decodes a tree, the second one's prompt is expanded, the third verifies a path."""
    model, expected = case
    runner, tokens = latent_runner(model, expands=True), TOKENS.numpy()
    step(runner, sequence_of(tokens[:200], range(16)), sequence_of(tokens[:90], range(40, 48)))
    # Node 1 is a wrong continuation; the path of nodes 0, 2 and 3 is the text.
    tree = DraftTree(np.array([-1, -1, 0, 2], np.int32))
    draft = np.array([tokens[201], 7, tokens[202], tokens[203]], np.uint32)
    logits = step(
        runner,
        sequence_of(tokens[:201], range(16), computed=200, draft=draft, tree=tree),
        sequence_of(tokens[:1], range(16, 32), draft=tokens[1:180]),
        sequence_of(tokens[:91], range(40, 48), computed=90, draft=tokens[91:95]),
    )
    assert (logits[[0, 1, 3, 4]] - expected[200:204]).abs().max() < CLOSE
    assert (logits[5:185] - expected[:180]).abs().max() < CLOSE
    assert (logits[185:] - expected[90:95]).abs().max() < CLOSE


def test_moved_entries_are_read_at_their_new_slots(case):
    model, expected = case
    runner, tokens = latent_runner(model, expands=True), TOKENS.numpy()
    step(runner, sequence_of(tokens[:64], range(4)))
    runner.attention.move(np.arange(64), np.arange(64) + 20 * PAGE_SIZE)
    entry = sequence_of(tokens[:65], range(20, 28), computed=64, draft=tokens[65:70])
    assert (step(runner, entry) - expected[64:70]).abs().max() < CLOSE


def test_the_cache_has_one_latent_and_one_key_per_token(case):
    model, _ = case
    attention = make_attention("plain", model.config, 64, PAGE_SIZE, torch.float32, "cpu")
    per_token = sum(each[:, 0, 0].numel() for each in attention.pages if each is not None)
    assert per_token == model.config.num_layers * (32 + 16) == model.config.num_layers * model.config.cache_size


def test_long_spans_are_expanded(case):
    """At the sizes of DeepSeek-V3 from 171 rows on; 15 for those here."""
    latent = case[0].config.latent
    parts = [sequence_of(np.zeros(length), range(32)) for length in (1, 14, 15, 200)]
    assert are_prompts(batch_of(parts, PAGE_SIZE), latent).tolist() == [False, False, True, True]


def test_memory_of_the_expanded_form_is_bounded(monkeypatch):
    """The bound excludes the output and a copy of part of it. All heads at once would take 59 MB, scores 61 MB."""
    monkeypatch.setattr(latent_attention, "WORKSPACE_BYTES", 16 << 20)
    heads, queries, entries = 8, 600, 3200
    latent = LatentConfig(query_rank=0, latent_dim=64, nope_dim=128, value_dim=128)
    expansion = Expansion(torch.randn(heads, 256, 64), latent)
    query, cached = torch.randn(queries, heads, 128 + 32), torch.randn(entries, 64 + 32)
    with Memory() as memory:
        attended = expansion.expanded(query, cached)
    assert memory.peak - 2 * attended.nbytes < 16 << 20
    assert attended.isfinite().all()
