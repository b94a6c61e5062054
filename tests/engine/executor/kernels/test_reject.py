"""Rejection sampling on the device, against `engine.speculation.rejection` one draft at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.executor.device_state import DeviceState
from engine.executor.kernels import verify_torch
from engine.executor.kernels.drafted import Drafted
from engine.speculation import rejection
from tests.engine.executor.kernels.backends import Backend, planted, triton_module

WIDTH = 7
LENGTH = 30


class Problem:
    """Ragged drafts with the distributions that they were drawn from, in flat rows with gaps between them."""

    def __init__(self, seed, *, trees, dtype, vocab):
        rng = np.random.default_rng(seed)
        self.trees = trees
        self.tokens, self.parents, self.starts, self.q_starts, self.counts = [0], [7], [], [], []
        p, q = [self._odds(rng, vocab)], []
        for _ in range(rng.integers(1, 5)):
            bushy = int(rng.choice([1, WIDTH]))
            gap = int(rng.integers(0, 2))
            count = int(rng.integers(0, WIDTH + 1))
            self.starts.append(len(self.tokens) + gap)
            self.q_starts.append(len(q))
            self.counts.append(count)
            parents = [int(rng.integers(-1, min(node, bushy))) if trees else node - 1 for node in range(count - 1)]
            own_p = [self._odds(rng, vocab, zeros=0.3) for _ in range(gap + count)]
            # Often close to the target, and sometimes the target itself.
            nearness = rng.choice([0.0, 0.7, 1.0])
            own_q = [nearness * odds + (1 - nearness) * self._odds(rng, vocab) for odds in own_p[gap:]]
            left = [odds.copy() for odds in own_q]
            drawn = []
            for parent in parents:
                odds = left[parent + 1]
                # Beyond what q can give, candidates are any; all must bear it.
                is_given = odds.sum() > 0 and rng.random() < 0.9
                drawn.append(int(rng.choice(vocab, p=odds / odds.sum() if is_given else None)))
                left[parent + 1][drawn[-1]] = 0
            self.tokens += [0] * (gap + min(count, 1)) + drawn
            self.parents += [7] * (gap + min(count, 1)) + parents
            p += own_p
            # Paths need a row of q for each draft token and no more.
            q += own_q if trees else own_q[: len(drawn)]
        self.p = torch.from_numpy(np.array(p)).to(dtype)
        self.q = torch.from_numpy(np.array(q).reshape(-1, vocab)).to(dtype)
        self.seeds = rng.integers(-(1 << 63), 1 << 63, len(self.starts))
        self.lengths = rng.integers(1, 20, len(self.starts))

    @staticmethod
    def _odds(rng, vocab, zeros=0.0):
        weights = rng.gamma(0.5, size=vocab) + 1e-3
        weights[rng.random(vocab) < zeros] = 0
        weights[0] += 1e-2
        return weights / weights.sum()

    def expected(self):
        """Kept rows and the target's own token of each sequence, as the reference gives them for it alone."""
        for index, (start, q_start, count) in enumerate(zip(self.starts, self.q_starts, self.counts, strict=True)):
            if count == 0:
                yield [], []
                continue
            p = self.p[None, start : start + count]
            q = self.q[None, q_start : q_start + count - (not self.trees)]
            draft = torch.tensor([self.tokens[start + 1 : start + count]], dtype=torch.int64)
            seeds, positions = torch.tensor([self.seeds[index]]), torch.tensor([self.lengths[index]])
            if self.trees:
                parents = torch.tensor([self.parents[start + 1 : start + count]], dtype=torch.int64)
                verdict = rejection.verify_tree(draft, parents, p, q, seeds, positions)
            else:
                lengths = torch.tensor([count - 1])
                verdict = rejection.verify_path(draft, lengths, p, q, seeds, positions)
            kept = verdict.kept[0]
            yield [*draft[0, kept].tolist(), int(verdict.tokens[0])], [0, *(1 + kept.nonzero()[:, 0]).tolist()]

    def solved(self, backend):
        """The same by a backend, on one batch; None if the state is not what follows from it."""
        device, batch = backend.device, len(self.starts)
        state = DeviceState.empty(batch, LENGTH, 1, 0, device)
        state.seeds[:batch] = torch.from_numpy(self.seeds)
        state.lengths[:batch] = torch.from_numpy(self.lengths)
        integers = {"dtype": torch.int32, "device": device}
        drafted = Drafted(
            tokens=torch.tensor(self.tokens, device=device),
            parents=torch.tensor(self.parents, **integers) if self.trees else None,
            starts=torch.tensor(self.starts, **integers),
            counts=torch.tensor(self.counts, **integers),
            scheduled=torch.full((batch,), 3, **integers),
            seats=torch.arange(batch, device=device),
        )
        q_starts = torch.tensor(self.q_starts, **integers)
        p, q = (odds.to(device).clone() for odds in (self.p, self.q))
        found = backend.reject(state, drafted, p, q, q_starts, WIDTH)
        results = []
        for index, (tokens, rows, count) in enumerate(zip(*(part.tolist() for part in found), strict=True)):
            length = int(self.lengths[index])
            is_noted = (
                state.history[index].tolist() == [0] * length + tokens[:count] + [0] * (LENGTH - length - count)
                and int(state.lengths[index]) == length + count
                and int(state.computed[index]) == 3 + max(count - 1, 0)
                and int(state.last_tokens[index]) == (tokens[count - 1] if count else 0)
            )
            if not is_noted or any(tokens[count:]) or any(rows[count:]):
                return None
            results.append((tokens[:count], rows[:count]))
        return results


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("trees", [False, True], ids=["paths", "trees"])
@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 40))
def test_drafts_are_verified_as_by_the_reference(backend, trees, dtype, seed):
    problem = Problem(seed, trees=trees, dtype=dtype, vocab=5)
    assert problem.solved(backend) == list(problem.expected())


@pytest.mark.parametrize("trees", [False, True], ids=["paths", "trees"])
def test_vocabularies_of_several_blocks(backend, trees):
    """And the last of them is not full."""
    for seed in range(3):
        problem = Problem(seed, trees=trees, dtype=torch.float64, vocab=9001)
        assert problem.solved(backend) == list(problem.expected())


TORCH_FAULTS = {
    "rows of q as those of p": ("(q_starts[:, None]", "(drafted.starts[:, None]"),
    "one position too late": ("state.lengths[seats].long()", "state.lengths[seats].long() + 1"),
    "seeds of others": ("seeds, positions = state.seeds[seats]", "seeds, positions = state.seeds[seats.flip(0)]"),
    "padding is tried": (
        "verdict.kept & rows.exist[:, 1:]",
        "verdict.kept.new_ones(verdict.kept.shape) & rows.exist[:, 1:]",
    ),
}

KERNEL_FAULTS = {
    "rows of q as those of p": (
        "q += tl.load(q_starts + sequence).to(tl.int64) * vocab",
        "q += start.to(tl.int64) * vocab",
    ),
    "accepts with p": ("uniform(key(accept_seed, place), rank) * q_drafted", "uniform(key(accept_seed, place), rank)"),
    "the noise of tokens": ("uniform(key(accept_seed,", "uniform(key(seed,"),
    "one chance for all siblings": ("place), rank) *", "place), tl.zeros([], tl.int64)) *"),
    "one chance for all depths": ("                place += 1\n", ""),
    "residual from p": ("tl.sum(tl.maximum(target - drafter, 0)", "tl.sum(tl.maximum(target, 0)"),
    "residual not normalised": (
        "_divided(tl.maximum(target - drafter, 0), p_total)",
        "tl.maximum(target - drafter, 0)",
    ),
    "q keeps the refused": ("_divided(tl.where(token == refused, 0, drafter), q_total)", "_divided(drafter, q_total)"),
    "no residual": ("                _leave_rest(p + at * vocab, q + at * vocab, token, vocab, VOCAB_BLOCK)\n", ""),
    "first block alone": ("(first + block_token).to", "block_token.to"),
    "nothing left": ("tl.where(is_left, rest, target)", "rest"),
}


def caught(backend):
    problems = [Problem(seed, trees=True, dtype=torch.float64, vocab=5) for seed in range(100)]
    problems += [Problem(seed, trees=True, dtype=torch.float64, vocab=5000) for seed in range(2)]
    try:
        return not all(problem.solved(backend) == list(problem.expected()) for problem in problems)
    except (RuntimeError, IndexError):
        return True


@pytest.mark.parametrize("fault", TORCH_FAULTS)
def test_planted_faults_are_caught(fault, tmp_path):
    assert caught(Backend(planted(verify_torch, *TORCH_FAULTS[fault], tmp_path)))


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_planted_faults_of_kernels_are_caught(fault, tmp_path):
    module = planted(triton_module(), *KERNEL_FAULTS[fault], tmp_path)
    assert caught(Backend(module, "cuda" if torch.cuda.is_available() else "cpu"))
