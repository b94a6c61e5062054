"""A model drafter with random weights that uses the whole interface: hidden states, a layer in the KV pages, q.

Its layer gets the pair (hidden state of t - 1, token t) at position t, and its output there gives the distribution of
token t + 1. Further draft positions use the layer's own output in place of the target's hidden state.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from engine.drafters.base import Drafter, DraftLayers, TargetOutputs
from engine.drafters.draft_forward import DraftSpan
from engine.drafters.drafts import DETERMINISTIC, Drafts
from engine.models.decoder import Layer
from engine.models.layers import PLAIN, RMSNorm
from engine.sampling.draft_sampler import DraftSampler
from ssd.types import ROOT, DraftBatch, offsets_of


class ToyDrafter(Drafter, nn.Module):
    """Drafts `depth` tokens, with `width` candidates at each depth; continues the first candidate."""

    def __init__(self, config, target, *, depth=3, width=1, ranked=()):
        """ranked: indices of the candidates at each depth that are the likeliest tokens instead of sampled ones."""
        super().__init__()
        shape = target.config
        torch.manual_seed(3)
        self.depth, self.width, self.ranked = depth, width, ranked
        self.needs = TargetOutputs((shape.num_layers,), layers=(DraftLayers(replace(shape, num_layers=1)),))
        self.model = [target.model]  # in a list, so that it is not registered as a submodule
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layer = Layer(shape, 0)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.last = {}
        """Last position with a hidden state of the target, and that state, by sequence id."""
        self.page_states = {}
        """Hidden state of the last slot of each page, by page."""
        self.log = []
        """Text, path of draft tokens, and logits at each depth of every proposal."""
        self.eval()

    def bind(self, forward):
        self.forward_over_pages = forward

    @torch.inference_mode()
    def observe(self, result):
        spans, pairs, tokens = [], [], []
        for index, sequence in enumerate(result.plan.table.of(result.plan.all_rows)):
            start = int(result.plan.computed[index])
            hidden = result.hidden_of(index)[: len(sequence) - start, 0]
            pairs += [self.state_before(sequence, start)[None], hidden[:-1]]
            tokens.append(sequence.tokens[start : start + len(hidden)])
            spans.append(DraftSpan(sequence.pages, start, len(hidden)))
            self.last[sequence.sequence_id] = start + len(hidden) - 1, hidden[-1]
            size = self.forward_over_pages.page_size
            for position in range(start, start + len(hidden)):
                if position % size == size - 1:
                    self.page_states[sequence.pages[position // size]] = hidden[position - start]
        rows = self.forward_over_pages.begin(spans)
        self.run(
            torch.cat(pairs), torch.from_numpy(np.concatenate(tokens).astype(np.int64)), rows.positions, rows.attend
        )

    def state_before(self, sequence, position):
        """The target's hidden state at the previous position."""
        if position == 0:
            return torch.zeros(self.fc.out_features)
        at, state = self.last.get(sequence.sequence_id, (None, None))
        if at == position - 1:
            return state
        size = self.forward_over_pages.page_size
        assert position % size == 0, "a prefix-cache hit ends with a page"
        return self.page_states[sequence.pages[position // size - 1]]

    def run(self, states, tokens, positions, attend):
        """Output states, [N, hidden size], for pairs of a hidden state and a token."""
        model = self.model[0]
        hidden = self.fc(torch.cat((model.embedding(tokens), states), dim=1))
        cos, sin = model.config.rope.turns(positions, model.frequencies)
        residual, change = self.layer(hidden, None, PLAIN, PLAIN.rotation(cos, sin, hidden.dtype), attend)
        return self.norm.normalize_sum(residual, change, PLAIN)[1]

    @torch.inference_mode()
    def propose(self, plan):
        at = np.flatnonzero((plan.scheduled[: plan.producers] == 1) & (plan.rooms >= self.width))
        if not len(at):
            return Drafts.empty(plan.producers)
        part = plan.take(at)
        sequences = part.producing
        depth = min(self.depth, int(part.rooms.min()) // self.width)
        paths = [np.empty(0, np.uint32) for _ in sequences]
        states = torch.stack([self.state_before(each, len(each) - 1) for each in sequences])
        tokens = torch.tensor([int(each.tokens[-1]) for each in sequences])
        candidates, distributions, all_logits, has_q = [], [], [], None
        sampler = DraftSampler(sequences)
        for step in range(depth):
            rows = self.forward_over_pages.begin([DraftSpan(e.pages, len(e) - 1 + step, 1) for e in sequences])
            states = self.run(states, tokens, rows.positions, rows.attend)
            logits = self.model[0].logits(states).float()
            sampled = sampler.sample(logits, np.arange(len(sequences)), step, self.width, paths)
            candidate_tokens = torch.from_numpy(sampled.tokens)
            chosen = candidate_tokens.clone()
            is_sampled = [candidate for candidate in range(self.width) if candidate not in self.ranked]
            chosen[:, is_sampled] = candidate_tokens[:, : len(is_sampled)]
            likely = logits if sampled.q is None else sampled.q
            chosen[:, list(self.ranked)] = likely.topk(self.width, dim=1).indices[:, list(self.ranked)]
            candidates.append(chosen)
            if sampled.q is not None:
                distributions.append(sampled.q)
            all_logits.append(logits)
            has_q = sampled.has_q
            tokens = chosen[:, 0]
            paths = [np.append(path, np.uint32(token)) for path, token in zip(paths, tokens.tolist(), strict=True)]
        self.log += [
            (each.tokens.copy(), path, [logits[index] for logits in all_logits])
            for index, (each, path) in enumerate(zip(sequences, paths, strict=True))
        ]
        return self.drafts(torch.stack(candidates, 1), distributions, has_q).scatter(at, plan.producers)

    def drafts(self, candidates, q, has_q):
        """candidates: [n, depth, width]. q: depth distributions [n, V], or none."""
        count, depth, width = candidates.shape
        size = depth * width
        own_parents = np.repeat(np.arange(depth) * width - width, width).clip(ROOT).astype(np.int32)
        rows = np.arange(depth)[None, :, None] * count + np.arange(count)[:, None, None] + np.zeros((1, 1, width), int)
        rows[~has_q] = DETERMINISTIC
        rows[:, :, list(self.ranked)] = DETERMINISTIC
        batch = DraftBatch(
            candidates.flatten().numpy().astype(np.uint32),
            np.tile(own_parents, count),
            np.full(count * size, 0.5, np.float32),
            np.zeros(count * size, np.uint8),
            offsets_of(np.full(count, size)),
        )
        return Drafts(batch, torch.cat(q) if q else None, rows.reshape(-1).astype(np.int32))

    def finish(self, sequence, learn):
        self.last.pop(sequence.sequence_id, None)

    def close(self):
        self.last.clear()


def naive_logits(drafter, text, path):
    """Logits at each depth, without pages or batches, from the text's own hidden states alone."""
    model = drafter.model[0]
    tokens, positions = torch.from_numpy(text.astype(np.int64)), torch.arange(len(text))
    _, states = model.hidden_states(tokens, positions, attend_densely, PLAIN, drafter.needs.hidden_layers)
    pairs = torch.cat((torch.zeros(1, states.shape[2]), states[:-1, 0]))
    found = []
    for token in path.tolist():
        out = drafter.run(pairs, tokens, torch.arange(len(tokens)), attend_densely)
        found.append(model.logits(out[-1:]).float()[0])
        pairs, tokens = torch.cat((pairs, out[-1:])), torch.cat((tokens, torch.tensor([token])))
    return found


def attend_densely(layer, query, key, value):
    repeats = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[2] ** -0.5
    scores = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value)
