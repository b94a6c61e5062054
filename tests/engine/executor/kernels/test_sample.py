"""Tokens chosen on the device, against those that the host's settings choose; keyed noise on every device."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.executor.batch import build_batch
from engine.executor.kernels import sample
from engine.executor.kernels.inputs import build_inputs
from engine.executor.kernels.sample import sampled_tokens
from engine.sampling.noise import choose_tokens, draw_tokens, gumbel_noise, mix64, uniforms
from engine.sampling.sampler import choose
from engine.sampling.truncation import Truncation
from engine.scheduling.request import GREEDY_BELOW, Request, SamplingParams
from engine.scheduling.sequence import Sequence
from tests.engine.executor.kernels.backends import planted, triton_module
from tests.engine.executor.kernels.hosted import PAGE_SIZE, give_drafts, padded_drafts, state_of

VOCAB = 50
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def on(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return device


row_settings = st.tuples(
    st.sampled_from([0.0, GREEDY_BELOW, 0.3, 1.0, 5.0]),
    st.sampled_from([-1, 0, 1, 7, 1000]),
    st.sampled_from([1.0, 0.9, 0.3, 1e-9]),
    st.sampled_from([0.0, 0.05, 1.0]),
)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60)
@given(rows=st.lists(row_settings, min_size=1, max_size=6), truncates=st.booleans(), seed=st.integers(0, 1 << 40))
def test_rows_are_drawn_as_by_the_settings_of_the_host(device, rows, truncates, seed):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, (len(rows), VOCAB)).astype(np.float32)).to(on(device))
    temperatures, top_k, top_p, min_p = (np.array(column) for column in zip(*rows, strict=True))
    truncation = Truncation(top_k, top_p, min_p) if truncates else None
    seeds, positions = (rng.integers(-(1 << 40), 1 << 40, len(rows)) for _ in range(2))
    expected = choose_tokens(logits, temperatures, seeds, positions, truncation)
    limits = truncation.on(logits) if truncation else None
    settings_there = (torch.from_numpy(array).to(device) for array in (temperatures, seeds, positions))
    assert torch.equal(draw_tokens(logits, *settings_there, limits), expected)


def random_step(seed, device):
    """Sequences of all settings, and their step on host and device."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(rng.integers(1, 5)):
        sampling = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 2.0])),
            seed=int(rng.integers(-(1 << 62), 1 << 62)),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1.0, 0.8])),
            min_p=float(rng.choice([0.0, 0.1])),
        )
        prompt = rng.integers(0, 3, rng.integers(1, 8)).astype(np.uint32)
        recorded = rng.integers(0, VOCAB, rng.integers(0, 9)).astype(np.uint32) if rng.random() < 0.5 else None
        sequences.append(Sequence(0, Request(prompt, sampling, recorded=recorded), len(prompt) + 12))
        sequences[-1].pages = list(range(8))
    give_drafts(sequences, rng, 4)
    batch = build_batch(sequences, PAGE_SIZE)
    seats_state, seats = state_of(sequences, device)
    scheduled = torch.tensor([sequence.scheduled for sequence in sequences], dtype=torch.int32, device=device)
    drafts = padded_drafts(sequences, 4, device, rng=rng)
    starts = torch.nn.functional.pad((scheduled + 4).cumsum(0, dtype=torch.int32), (1, 0))
    inputs = build_inputs(seats_state, seats, scheduled, drafts, starts, int(starts[-1]) + 1, PAGE_SIZE)
    return sequences, batch, seats_state, inputs, rng


def agrees(module, seed, device="cpu"):
    sequences, batch, seats_state, inputs, rng = random_step(seed, device)
    logits = torch.from_numpy(rng.normal(0, 3, (len(inputs.tokens), VOCAB)).astype(np.float32)).to(device)
    sampled = module.sampled_tokens(seats_state, inputs, logits, draws=True, most=VOCAB)
    tokens = module.replayed(seats_state, inputs, sampled)
    firsts, counts = inputs.drafted.starts[:, None], inputs.drafted.counts[:, None]
    row = torch.arange(len(logits), device=device)
    counted = ((row >= firsts) & (row < firsts + counts)).any(dim=0)
    if not counted.any():
        return True
    return tokens[counted].tolist() == choose(batch, logits[counted], sequences).tokens.tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_of_a_step_are_those_of_the_sampler(device):
    assert all(agrees(sample, seed, on(device)) for seed in range(60))


FAULTS = {
    "the position before": ("inputs.positions + 1", "inputs.positions"),
    "settings of other sequences": ("seats = inputs.seats", "seats = inputs.seats.roll(1)"),
    "the recorded token of the row itself": ("state.history[:, 1:]", "state.history"),
    "no token 0 is recorded": ("recorded == NOT_RECORDED", "recorded <= 0"),
    "no truncation": ("None if most is None else Limits", "None if most else Limits"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, tmp_path):
    module = planted(sample, *FAULTS[fault], tmp_path)
    assert not all(agrees(module, seed) for seed in range(60))


def test_greedy_steps_take_the_largest_logit():
    *_, seats_state, inputs, rng = random_step(0, "cpu")
    logits = torch.from_numpy(rng.normal(size=(len(inputs.tokens), VOCAB)))
    assert torch.equal(sampled_tokens(seats_state, inputs, logits, draws=False), logits.argmax(dim=1))


def numbers(count=2000):
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator) for _ in range(2))


@pytest.mark.gpu
def test_noise_of_a_gpu_is_that_of_the_cpu():
    """Keys and uniforms to the bit. A logarithm's last bit may differ: rarely, and only by one step of float32."""
    seeds, positions = numbers()
    device = on("cuda")
    there = seeds.to(device), positions.to(device)
    assert torch.equal(mix64(there[0]).cpu(), mix64(seeds))
    assert torch.equal(uniforms(*there, there[0]).cpu(), uniforms(seeds, positions, seeds))
    assert almost_equal(gumbel_noise(*there, 5000).cpu(), gumbel_noise(seeds, positions, 5000))


def almost_equal(left, right):
    """Float32: equal but for one in a million, and those within one part in 4 million or so (or near 0)."""
    differ = left != right
    return differ.float().mean() < 1e-6 and torch.allclose(left, right, rtol=2**-22, atol=2**-30)


@pytest.mark.parametrize("wrong", [False, True], ids=["as it is", "planted fault"])
def test_noise_of_kernels_is_that_of_pytorch(wrong):
    triton_module()
    from tests.engine.executor.kernels.noise_kernel import fill

    device = "cuda" if torch.cuda.is_available() else "cpu"
    seeds, positions = (array[:200].to(device) for array in numbers())
    noise = torch.empty(200, 1000, device=device)
    chances = torch.empty(200, 1000, dtype=torch.float64, device=device)
    fill[(200,)](seeds, positions, noise, chances, 1000, int(wrong), 1024)
    assert almost_equal(noise.cpu(), gumbel_noise(seeds, positions, 1000).cpu()) != wrong
    for rank in (0, 3, 999):
        assert torch.equal(chances[:, rank], uniforms(seeds, positions, torch.full_like(seeds, rank)))
