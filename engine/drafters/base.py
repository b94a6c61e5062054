"""The interface between the engine and its drafters.

How to write a drafter
======================

A drafter that reads only tokens inherits from `ssd.types.Drafter` (`start`, `draft`, `finish` and `close`, with ids and
arrays as arguments); the engine wraps it in `engine.drafters.tokens.TokenDrafter`. Any other drafter inherits from
`Drafter` below. Both are selected with `--drafter package.module:Class` and constructed as `Class(config, target)`:
`config` is an `ssd.config.DrafterConfig`, whose `options` are the `--drafter-option` pairs, and `target` a
`TargetInfo`. All but `draft` and `propose` have defaults.

Order of calls, all of them from the thread that runs the engine:

    bind(forward)            once, after the KV cache exists
    start(sequence)          once per sequence, before its first step; not again after a preemption
    propose(plan)            at most once per step, before the target's forward pass, for the sequences of
                             `plan.producing`, which excludes requests without drafts (`Request.is_drafted`); not called
                             in steps in which drafting is not worthwhile
    observe(result)          after every step, once its tokens are committed, with all sequences of the step
    finish(sequence, learn)  once per sequence, after `observe` of its last step, or between steps if it is cancelled
    close()                  once

`propose` returns at most `plan.rooms[i]` tokens for sequence i. Within a draft, parents precede their children. The
engine may verify only a part of a draft; `observe` reports which. If a drafter raises, or its drafts break these rules,
the step runs without drafts; `engine.drafters.guard` counts and reports such problems.

Verification
------------

`exact` (the default): the target's token at each position is fixed by noise that depends on the request's seed and on
the position; a draft token is accepted if it is that token. A drafter that samples uses the same noise, so that its
tokens are the target's wherever the two distributions agree (Gumbel coupling). `q` is not used.

`rejection`: a token x that was sampled from `q` is accepted with probability min(1, p(x) / q(x)), otherwise the
target's token is sampled from the normalized residual max(p - q, 0). A token without a row of `q` is a deterministic
candidate, as if q were one-hot. A draft with sampled tokens must be a path; trees are verified as in exact mode.
A drafter samples with `engine.sampling.draft_sampler.draft_seeds`, whose noise is independent of the target's and of
that of the sequence's earlier drafts. Outputs follow the target's distribution only if the decision to propose a
sampled token depends solely on its prefix and earlier drafts, never on the token itself or its probability. For the
same reason the engine ignores the `accept_prob` of such drafts: it verifies all tokens up to a depth that it chooses
from past acceptance rates.

`engine.sampling.draft_sampler` samples for both modes, with the temperature, penalties and truncation of each request.

Extra rows in the target's batch
--------------------------------

A drafter that declares `extra_rows` may add up to `plan.extra_rooms[i]` tokens to sequence i: `Drafts.extra`. They run
in the same forward pass as the draft, but are not verified; `StepResult.extra_tokens` has the target's most likely
token after each of them. Each extra row attends to the context, its ancestors among the extra rows and itself, and its
position follows its depth, as in a draft tree. No other row attends to it, and its keys and values are overwritten by
the next step, so extra rows never change outputs.

Layers in the target's KV pages
-------------------------------

A drafter with layers of its own declares them as `DraftLayers`. They have a cache of their own with the same pages:
the target's page tables, slots and prefix cache apply to them, so the content of slot t must depend on tokens 0..t
alone. A drafter that reads hidden states computes slot t from the pair (hidden state of t - 1, token t). When `observe`
has returned, all slots of pages that are full of computed tokens must be written, or known to be missing, because other
sequences may share these pages from then on. Slots of rejected draft tokens are overwritten later and never read.

After a prefix-cache hit of n tokens the first row in `observe` belongs to position n. Its pair needs the hidden state
of n - 1, which is not computed again. Since n is a multiple of the page size, it suffices to keep the hidden state of
the last slot of every page, indexed by page.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from engine.drafters.drafts import Drafts
from ssd.types import NO_LIMITS, DraftLimits

if TYPE_CHECKING:  # Drafters of tokens do not need PyTorch.
    from collections.abc import Sequence as SequenceOf
    from pathlib import Path

    import torch
    from torch import Tensor

    from engine.config import EngineConfig
    from engine.drafters.device_chain import DeviceChain
    from engine.drafters.draft_forward import DraftForward
    from engine.models.config import ModelConfig
    from engine.models.decoder import Decoder
    from engine.scheduling.plan import StepPlan
    from engine.scheduling.result import StepResult
    from engine.scheduling.sequence import Sequence
    from ssd.corpus.corpus import Corpus


class DraftLayers(NamedTuple):
    """Layers of a drafter that store keys and values in the pages of the target."""

    config: ModelConfig
    """Number of layers, and the number and size of their heads."""
    first_slot: int = 0
    """Slots of a sequence before it are neither written nor attended to."""
    state_size: int = 0
    """Number of further values, in the target's dtype, that the drafter stores for each slot of the KV cache."""


class TargetOutputs(NamedTuple):
    """Outputs and resources that a drafter needs from the target."""

    hidden_layers: tuple[int, ...] = ()
    """Layers after which hidden states are taken, ascending; `num_layers` is the last layer's output before the final
    norm, 0 the embedding."""
    top_k: int = 0
    """Number of largest logits, with their tokens, for each verified row."""
    layers: tuple[DraftLayers, ...] = ()
    """The drafter's own layers in the KV pages; several groups if drafters are combined."""
    extra_rows: int = 0
    """Largest number of extra rows of a sequence in a step, see `ExtraRows`."""

    def check(self, model: ModelConfig) -> None:
        """Raise ValueError unless the target has these outputs."""
        layers = self.hidden_layers
        if list(layers) != sorted({*layers}) or not all(0 <= layer <= model.num_layers for layer in layers):
            raise ValueError(f"hidden_layers must be ascending numbers from 0 to {model.num_layers}, not {layers}")
        if not 0 <= self.top_k <= model.vocab_size:
            raise ValueError(f"top_k must be 0 to {model.vocab_size}, not {self.top_k}")
        if self.extra_rows < 0:
            raise ValueError(f"extra_rows must not be negative, not {self.extra_rows}")


NO_OUTPUTS = TargetOutputs()
OWN_PACKAGES = ("ssd", "drafter_service", "engine")
"""Packages whose drafters return valid drafts, as their tests check."""


@dataclass(frozen=True)
class TargetInfo:
    """The target model and the engine's limits."""

    config: ModelConfig
    max_sequences: int
    """Largest number of sequences in a step."""
    max_draft: int
    """Largest number of draft tokens of a sequence in a step."""
    page_size: int
    """Tokens in a page of KV cache."""
    model: Decoder | None = None
    """None where only the configuration is needed, as in tests."""
    folder: Path | None = None
    """Folder that the target was loaded from."""

    @classmethod
    def from_model(cls, model: Decoder, engine: EngineConfig, folder: Path | None = None) -> TargetInfo:
        """Describe a loaded model and the settings of the engine that runs it."""
        return cls(model.config, engine.max_sequences, engine.max_draft, engine.page_size, model, folder)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the target's weights and hidden states. Raises ValueError without a model."""
        return self._weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the target. Raises ValueError without a model."""
        return self._weight.device

    @property
    def _weight(self) -> Tensor:
        if self.model is None:
            raise ValueError("this drafter needs the target's model, not only its configuration")
        return self.model.embedding.weight


class Drafter(ABC):
    """Proposes draft tokens; see the module's docstring for the rules."""

    needs: TargetOutputs = NO_OUTPUTS
    """Outputs and resources that the drafter needs from the target."""
    limits: DraftLimits = NO_LIMITS
    """The most that drafts can save, final after `bind`. An engine that measures its steps does not call a drafter that
    cannot pay, and none calls `propose` and `observe` of a drafter with a depth of 0."""
    copies: SequenceOf[Decoder] = ()
    """Rounded copies of the target, whose weights change with the target's."""

    @property
    def origin(self) -> type:
        """The class that drafts, for messages."""
        return type(self)

    @property
    def is_trusted(self) -> bool:
        """Whether drafts need not be checked."""
        return self.origin.__module__.split(".")[0] in OWN_PACKAGES

    @property
    def is_connected(self) -> bool | None:
        """Whether a remote drafter is connected; None for others."""
        return None

    @property
    def skipped_steps(self) -> Mapping[str, int]:
        """Number of steps in which a part of the drafter was not called, by its kind."""
        return MappingProxyType({})

    def corpora(self, adapter: str | None = None) -> Iterable[Corpus]:
        """Return the corpora in this process that have the outputs of a LoRA adapter; None: of requests without one."""
        return ()

    def bind(self, forward: DraftForward) -> None:
        """Store access to the KV pages."""
        return

    def device_chain(self, config: EngineConfig) -> DeviceChain | None:
        """Return the drafter's part of the graph executor's steps, for which `propose` and `observe` are not called."""
        return None

    def weights_changed(self) -> None:
        """Prepare for other weights of the target and of `copies`, which were overwritten while no request ran."""
        return

    def start(self, sequence: Sequence) -> None:
        """Begin a sequence; its prompt is `sequence.request.prompt`."""
        return

    @abstractmethod
    def propose(self, plan: StepPlan) -> Drafts:
        """Return a draft for each sequence of `plan.producing`, of at most `plan.rooms` tokens."""

    def observe(self, result: StepResult) -> None:
        """Process the tokens that a step committed, and the target's outputs named in `needs`."""
        return

    def finish(self, sequence: Sequence, learn: bool) -> None:
        """End a sequence. `learn`: whether its output may be remembered for other requests."""
        return

    def close(self) -> None:
        """Release the drafter's resources."""
        return
