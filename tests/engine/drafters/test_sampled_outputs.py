"""Sampled outputs of the whole engine have the target's distribution, with every drafter and way of verification.

Planted faults of verification must be caught by the same test. Faults that only lower the acceptance are planted in
`test_acceptance.py`.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.drafters.autoregressive import Growth
from engine.drafters.base import TargetInfo
from engine.drafters.registry import KINDS, build_drafter, configure
from engine.engine import build_engine
from engine.models.heads.formats import save_head
from engine.models.heads.head import DraftHead
from engine.models.hf_config import config_to_hf
from engine.models.layers import PLAIN
from engine.models.loader import load_model, save_model
from engine.sampling import draft_sampler
from engine.sampling.draft_sampler import NONE, DraftSampler
from engine.speculation import rejection, speculation, verify
from engine.speculation.selection import DraftSelection
from engine.training.networks import new_draft_model, new_eagle3, new_medusa, new_mtp
from engine.training.objectives import Windows
from ssd.config import DrafterConfig
from tests import naive
from tests.curves import line
from tests.engine.forward import attend_densely
from tests.engine.sampled_outputs import TEMPERATURE, VOCAB, fits, new_target, sampled_requests
from tests.engine.steps import AllTokens, accepting

CONFIG = EngineConfig(max_sequences=250, max_step_tokens=4000, max_draft=6, kv_memory_mib=16)
DEPTH = 3
# Other drafters of tokens draft like `ssd`, paths or trees of deterministic candidates, and `eagle` like `mtp`.
DRAFTERS = [
    "ssd", "lookahead", "recycle", "draft-model", "self-int8", "mtp", "eagle3", "medusa", "ssd+mtp",
    "ngram+draft-model+medusa",
]  # fmt: skip


@torch.inference_mode()
def states_of(target, texts, layers):
    """Return windows of texts, int64 [B, T], with the target's states after layers."""
    positions = torch.arange(texts.shape[1])
    states = [target.hidden_states(text, positions, attend_densely, PLAIN, layers)[1] for text in texts]
    return Windows(texts, torch.stack(states))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of the target, and of weights that resemble it by kind."""
    root = tmp_path_factory.mktemp("weights")
    target = new_target()
    texts = torch.from_numpy(np.random.default_rng(1).integers(0, VOCAB, (200, 20)))
    heads = {
        "mtp": new_mtp(target, states_of(target, texts, (1, 2))),
        "eagle3": new_eagle3(target, (0, 1, 2), torch.arange(0, VOCAB - 2), states_of(target, texts, (0, 1, 2, 1, 2))),
        "medusa": new_medusa(target, DEPTH, states_of(target, texts, (2,))),
    }
    for kind, head in heads.items():
        save_head(head, root / kind, dtype=torch.float32)
    for name, model in (("target", target), ("draft-model", new_draft_model(target, 1))):
        (root / name).mkdir()
        save_model(model, root / name, config_to_hf(model.config, "float32"), dtype=torch.float32)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def target(folders):
    return load_model(folders["target"])


def run(target, folders, kind, shape, requests, selection=None):
    """Return the outputs of requests with a drafter, all of whose tokens are verified without a selection."""
    config = replace(CONFIG, draft_shape=shape)
    kinds = [KINDS[each] for each in kind.split("+")]
    options = {"depth": str(DEPTH)} if any(each.runs_model for each in kinds) else {}
    settings = DrafterConfig(draft_shape=shape, max_draft=CONFIG.max_draft, capacity=20_000)
    info = TargetInfo.from_model(target, config, folders["target"])
    drafter = build_drafter(kind, configure(kind, settings, options), info, draft_models=folders)
    engine = build_engine(target, config, drafter)
    engine._speculation._selection = engine._selection = selection
    completions = engine.generate(requests)
    engine.close()
    assert sum(each.accepted for each in completions) > len(requests)
    return [each.tokens for each in completions]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_outputs_have_the_targets_distribution(target, folders, kind):
    """Requests of both modes run in the same batches, one half of the tokens with paths and the other with trees."""
    # Drafts of `mtp` deviate less with the planted fault `q_of_another_row`.
    outputs, count = [], 2500 if "mtp" in kind else 1500
    for seed, shape in ((0, "path"), (10_000, "tree")):
        submitted = sampled_requests(count, "exact", seed) + sampled_requests(count, "rejection", seed + 5000)
        outputs += run(target, folders, kind, shape, submitted)
    assert fits(target, outputs)


# Paths, where rejection sampling is used, with a drafter whose tokens are rejected more often. Other verification gives
# the tokens of plain decoding, which other tests compare one by one.
def test_small_deviations_from_the_targets_distribution_are_excluded(target, folders):
    assert fits(target, run(target, folders, "mtp", "path", sampled_requests(60_000, "rejection")))


@pytest.fixture
def unlike_target(monkeypatch):
    """Let one half of the draft tokens be token 0, and sample the others from a sharper distribution."""
    original = DraftHead.target_logits

    def changed(head, hidden):
        logits = 1.6 * original(head, hidden)
        logits[:, 0] = TEMPERATURE * torch.logsumexp(logits[:, 1:] / TEMPERATURE, dim=1)
        return logits

    monkeypatch.setattr(DraftHead, "target_logits", changed)


def drops_unlikely_tokens(monkeypatch):
    """Planted fault: a sampled token is not drafted if its own probability is low."""
    sample = DraftSampler.sample

    def likely_ones(*arguments):
        sampled = sample(*arguments)
        is_likely = sampled.q.gather(1, torch.from_numpy(sampled.tokens)) > 0.2
        return sampled._replace(tokens=np.where(is_likely, sampled.tokens, NONE))

    monkeypatch.setattr(DraftSampler, "sample", likely_ones)


def drafts_with_the_targets_noise(monkeypatch):
    """Planted fault: tokens for rejection sampling are drafted with the noise that samples the target's tokens."""
    monkeypatch.setattr(draft_sampler, "draft_seeds", lambda seeds, committed: seeds)


def residual_is_p(monkeypatch):
    monkeypatch.setattr(rejection, "_residuals", lambda p, *_: p)


def q_of_another_row(monkeypatch):
    found = Growth.drafts

    def shifted(*arguments):
        drafts = found(*arguments)
        return replace(drafts, q=drafts.q.roll(1, dims=0).roll(1, dims=1))

    monkeypatch.setattr(Growth, "drafts", shifted)


def budget_sees_tokens(monkeypatch):
    monkeypatch.setattr(speculation, "uses_rejection", lambda plan: np.zeros(plan.producers, np.bool_))


class ByOwnProbability(AllTokens):
    """A selection that drops every token with a low `accept_prob`, and the tokens after it."""

    def select(self, plan, drafts, usable):
        lengths = []
        for start, end in pairwise(drafts.offsets.tolist()):
            unlikely = drafts.accept_prob[start:end] < 0.2
            lengths.append(int(unlikely.argmax()) if unlikely.any() else end - start)
        return np.array(lengths)


@pytest.fixture
def own_probabilities(monkeypatch):
    """Let `accept_prob` be a sampled token's own probability, on which verification must not depend."""
    found = Growth.drafts

    def boastful(*arguments):
        drafts = found(*arguments)
        own = drafts.q[drafts.q_rows, drafts.batch.tokens.astype(np.int64)].numpy()
        return replace(drafts, batch=replace(drafts.batch, accept_prob=own))

    monkeypatch.setattr(Growth, "drafts", boastful)


@pytest.mark.usefixtures("unlike_target", "own_probabilities")
@pytest.mark.parametrize(
    "fault",
    [
        None, drops_unlikely_tokens, drafts_with_the_targets_noise, residual_is_p, q_of_another_row, budget_sees_tokens,
    ],
)  # fmt: skip
def test_planted_faults_of_rejection_are_caught(target, folders, monkeypatch, fault):
    if fault is not None:
        fault(monkeypatch)
    requests = sampled_requests(10_000, "rejection")
    outputs = run(target, folders, "self-int8", "path", requests, ByOwnProbability())
    assert fits(target, outputs) == (fault is None)


@pytest.mark.usefixtures("unlike_target", "own_probabilities")
def test_outputs_have_the_targets_distribution_with_the_token_budget(target, folders, monkeypatch):
    monkeypatch.setattr(speculation, "perf_counter", lambda: 0.0)  # No backoff from measured times.
    requests = sampled_requests(10_000, "rejection")
    assert fits(target, run(target, folders, "self-int8", "path", requests, DraftSelection(line(0.002))))


def accepts_one_more(monkeypatch):
    """Planted fault: the first wrong token of a path is accepted."""
    fault = accepting(lambda draft, _, own: range(min(len(draft), naive.accepted_length(draft, own) + 1)))
    monkeypatch.setattr(verify, "accept_exactly", fault)


def accepts_any_branch(monkeypatch):
    """Planted fault: nodes of a tree are accepted although their parents are not."""
    fault = accepting(lambda draft, parents, own: np.flatnonzero(draft == own[parents + 1]))
    monkeypatch.setattr(verify, "accept_exactly", fault)


@pytest.mark.parametrize(("fault", "shape"), [(accepts_one_more, "path"), (accepts_any_branch, "tree")])
def test_planted_faults_of_exact_verification_are_caught(target, folders, monkeypatch, fault, shape):
    fault(monkeypatch)
    assert not fits(target, run(target, folders, "mtp", shape, sampled_requests(10_000, "exact")))
