"""Logits of a token do not depend on drafts, other sequences or pages."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.plain import KEY_BLOCK, LENGTH, POSITION, ROW, PlainAttention, query_blocks
from engine.models.loader import load_model
from engine.models.packed import pack
from tests.engine.conftest import VOCAB
from tests.engine.forward import PAGE_SIZE, new_runner, prompt_logits, sequence_of
from tests.engine.steps import batch_of

TEXT = np.random.default_rng(0).integers(1, VOCAB, 400).astype(np.uint32)


@pytest.fixture(scope="module")
def reference(model):
    return prompt_logits(model, TEXT)


@pytest.fixture
def threads(request):
    """Set PyTorch's number of threads; other tests use one."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


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


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 300)), min_size=1, max_size=4))
def test_query_blocks_cover_a_batch_within_key_blocks(spans):
    sequences = [sequence_of(np.ones(computed + length), range(60), computed=computed) for computed, length in spans]
    batch = batch_of(sequences, PAGE_SIZE)
    blocks = query_blocks(batch)
    rows = [row for block in blocks for row in range(block[ROW], block[ROW] + block[LENGTH])]
    assert rows == list(range(len(batch.tokens)))
    for block in blocks:
        assert block[POSITION] // KEY_BLOCK == (block[POSITION] + block[LENGTH] - 1) // KEY_BLOCK
        assert block[POSITION] == batch.positions[block[ROW]]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of PyTorch has no oneDNN")
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.usefixtures("threads")
def test_rounding_does_not_depend_on_the_step(model_folder):
    """With packed weights, logits are bitwise equal, independent of the step's content."""
    model = pack(load_model(model_folder))
    sequence = sequence_of(TEXT[:250], range(32), draft=TEXT[250:260])
    within_draft = new_runner(model, 32).forward(batch_of([sequence], PAGE_SIZE))
    runner = new_runner(model, 32)
    for length in range(250, 261):
        computed = 0 if length == 250 else length - 1
        alone = runner.forward(batch_of([sequence_of(TEXT[:length], range(32), computed=computed)], PAGE_SIZE))
        assert torch.equal(alone[0], within_draft[length - 250])


def test_slots_before_the_first_are_not_attended_to(model):
    config = model.config
    attention = PlainAttention(config, 4, PAGE_SIZE, torch.float32, "cpu", first_slot=1)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(20, heads, config.head_dim, generator=generator) for heads in (4, 2, 2))
    pages = [2, 0]
    attention._keys[0, 2, 0] = attention._values[0, 2, 0] = 9.0
    steps = (sequence_of(TEXT[:12], pages, computed=1), sequence_of(TEXT[:20], pages, computed=12))
    attended = []
    for sequence, rows in zip(steps, (slice(1, 12), slice(12, 20)), strict=True):
        attend = attention.begin(batch_of([sequence], PAGE_SIZE))
        attended.append(attend(0, query[rows], key[rows], value[rows]).clone())
    heads = (part[1:].transpose(0, 1) for part in (query, key, value))
    expected = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(0, 1)
    torch.testing.assert_close(torch.cat(attended), expected)
