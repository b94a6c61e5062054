"""States of grammars along outputs, by the library llguidance (optional, imported on first use).

A `GrammarState` is the state of the grammar after the committed tokens of one output. Drafts are followed with copies
of it; a copy takes 2 us.

The library builds the automaton of a grammar as it is needed, up to limits. All states that began with one compiled
grammar share the automaton, and once a limit is reached, none of them can continue. A state that cannot continue is
therefore built again with an automaton of its own and a larger limit, and fails only if that one is reached, too.

The library's limits do not bound the time and memory of compiling. Servers first compile a grammar in another process
(`engine.api.grammar_checker`). The time of masks and the memory of kept grammars are bounded here.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter, thread_time
from typing import TYPE_CHECKING

import numpy as np

from engine.sampling.grammar import Grammar, definition
from ssd.errors import UserError, missing_extra

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from engine.models.tokenizer import Tokenizer
    from engine.speculation.draft_tree import DraftTree

LOG = logging.getLogger(__name__)
MAX_KEPT_S = 1.0
"""Processor time in seconds that compiling all kept grammars, and their masks, may have taken. It bounds their memory,
which llguidance does not tell: version 1.9.1 takes up to 0.7 GB for each second of it."""
MAX_MASK_S, MAX_DELAY_S = 0.01, 0.25
"""Processor time in seconds that each mask of an output may take, and what all of its masks may take in addition."""
MAX_STATES = 50_000
"""Largest number of states of an automaton, of 1 to 2 KB each. A larger one is built again when it is needed."""
NOTHING_ALLOWED = "NoExtensionBias"
"""The library's message where no token is allowed."""
SHARED_FUEL, OWN_FUEL = 100_000, 400_000
"""Maximum work for a mask with a shared automaton, and with one of a state's own. The unit is about 0.1 us."""
MAX_MESSAGE = 300
"""Maximum number of characters of the library's message in an error."""


class GrammarError(UserError):
    """An output cannot be continued, because the library has reached a limit or no token is allowed."""


@dataclass
class CompiledGrammar:
    """A grammar with its automaton."""

    grammar: Grammar
    matcher: LLMatcher
    """The library's state before the first token."""
    spent_s: float = 0.0
    """Processor time of compiling and of all masks so far, in seconds."""


class GrammarState:
    """The state of a grammar after some tokens."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        compiled: CompiledGrammar,
        matcher: LLMatcher,
        tokens: LinkedTokens | None = None,
        *,
        has_ended: bool = False,
    ) -> None:
        """matcher: the library's state after `tokens`. has_ended: whether an end token followed them."""
        self.mask_s = 0.0
        """Mean duration of a mask in the last `allowed_along`, in seconds."""
        self._compiler = compiler
        self._compiled = compiled
        self._matcher = matcher
        self._tokens = tokens
        self._has_ended = has_ended
        self._delay_s = 0.0
        """Processor time of all masks beyond `MAX_MASK_S` for each."""

    def copy(self) -> GrammarState:
        """Return an independent state."""
        return GrammarState(
            self._compiler, self._compiled, self._matcher.deep_copy(), self._tokens, has_ended=self._has_ended
        )

    def accept(self, token: int) -> bool:
        """Advance by a token; return whether the grammar allows it. Otherwise the state does not change.

        Returns False, too, if the library has reached a limit.
        """
        if self._has_ended:
            return False
        if token in self._compiler.end_tokens:
            # The library does not accept end tokens where nothing else may follow.
            self._has_ended = self._matcher.is_accepting()
            return self._has_ended
        if self._matcher.try_consume_tokens([token]) != 1:
            return False
        self._tokens = (self._tokens, token)
        return True

    def advance(self, token: int) -> None:
        """Advance by a token that `allowed` contains. If the library reaches a limit, `allowed` raises GrammarError."""
        if self.accept(token):
            return
        self._restart()
        if not self.accept(token):
            # Leave the matcher in its error state.
            self._tokens = (self._tokens, token)
            self._matcher.consume_tokens([token])

    def forced(self, count: int | None = None) -> list[int]:
        """Return the first `count` tokens that must follow, with the end token if nothing else may follow them."""
        if self._has_ended:
            return []
        forced = self._matcher.compute_ff_tokens()
        if count is not None and count <= len(forced):
            return forced[:count]
        ends = self._compiler.end_tokens
        after = self.copy()
        after._matcher.try_consume_tokens(forced)
        # The library does not count end tokens among the forced ones.
        if len(ends) == 1 and after._matcher.is_accepting():
            mask = after._mask()
            if mask is not None and np.count_nonzero(mask) == 1:
                forced += ends
        return forced

    def allowed(self) -> np.ndarray:
        """Return which tokens may follow, bool [V]: at least one. End tokens may follow a complete output.

        Raises GrammarError if no token may follow, or if the library has reached a limit.
        """
        mask = self._mask()
        if mask is None:
            self._restart()
            mask = self._mask()
        if mask is None:
            raise GrammarError(_cannot_continue(self._compiled.grammar, self._matcher.get_error()))
        return mask

    def allowed_along(
        self, draft: np.ndarray, tree: DraftTree | None, needed: np.ndarray
    ) -> tuple[np.ndarray, dict[int, GrammarError]]:
        """Return which tokens may follow the committed tokens and each token of a draft, bool [rows, V].

        draft: uint32 [k]. tree: its shape, None for a path. needed: bool [k + 1], the rows to return. All tokens
        are allowed after a forbidden draft token, because that row is not used, and after tokens that the grammar
        cannot continue. The second value has the errors of the latter rows, by index. If the masks of the output have
        taken too long, all rows have an error.
        """
        parents = [-1, *(range(-1, len(draft) - 1) if tree is None else tree.parents.tolist())]
        rows = np.ones((len(parents), self._compiler.vocab_size), np.bool_)
        errors: dict[int, GrammarError] = {}
        states: list[GrammarState | None] = []
        began, cpu_began = perf_counter(), thread_time()
        for row, (token, parent) in enumerate(zip([-1, *draft.tolist()], parents, strict=True)):
            before = states[1 + parent] if row else None
            is_known = row > 0 and bool(needed[1 + parent])
            state = self if row == 0 else _after(before, token, rows[1 + parent] if is_known else None)
            if state is not None and needed[row]:
                try:
                    rows[row] = state.allowed()
                except GrammarError as problem:
                    errors[row] = problem
                    state = None
            states.append(state)
        self.mask_s = (perf_counter() - began) / len(parents)
        # Other processes must not end an output, so this is processor time.
        spent = thread_time() - cpu_began
        self._compiled.spent_s += spent
        self._delay_s += max(0.0, spent - MAX_MASK_S * len(parents))
        if self._delay_s > MAX_DELAY_S:
            late = GrammarError(
                f"{self._compiled.grammar.kind}: the output cannot be continued, because finding the allowed tokens "
                f"takes too long: {self._delay_s:.2g} s more than {1000 * MAX_MASK_S:g} ms for each token; use a "
                "simpler grammar"
            )
            errors = dict.fromkeys(np.flatnonzero(needed).tolist(), late) | errors
        return rows[needed], errors

    def _mask(self) -> np.ndarray | None:
        """Return which tokens may follow; None if none may, or if the library has reached a limit."""
        words = np.zeros(-(-self._compiler.tokenizer.vocab_size // 32), np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        # In its error state, the library allows the end token.
        if self._matcher.is_error():
            return None
        mask = np.unpackbits(words.view(np.uint8), bitorder="little")[: self._compiler.vocab_size].astype(np.bool_)
        return mask if mask.any() else None

    def _restart(self) -> None:
        """Build the state again with an automaton of its own."""
        self._compiled = self._compiler.renew(self._compiled.grammar)
        self._matcher = self._compiled.matcher
        tokens, rest = [], self._tokens
        while rest is not None:
            rest, token = rest
            tokens.append(token)
        # On failure this leaves the matcher in its error state.
        self._matcher.consume_tokens(tokens[::-1])


LinkedTokens = tuple["LinkedTokens | None", int]
"""A linked list of tokens, the last one first. Copies of a state share it."""


def _after(before: GrammarState | None, token: int, allowed: np.ndarray | None) -> GrammarState | None:
    """Return the state after one more token; None if it is forbidden. allowed: the mask of `before`, if known."""
    if before is None or (allowed is not None and not allowed[token]):
        return None
    after = before.copy()
    if allowed is None:
        return after if after.accept(token) else None
    after.advance(token)
    return after


class GrammarCompiler:
    """Compiles grammars for the vocabulary of one model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: tuple[int, ...]) -> None:
        """vocab_size: number of token ids of the model. end_tokens: ids of tokens that end an output."""
        self.vocab_size = vocab_size
        self.end_tokens = list(end_tokens)
        self._hub_tokenizer = tokenizer
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        """The most recently used last."""

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """The library's own tokenizer; reading it takes a while."""
        from llguidance import LLTokenizer

        # The vocabularies of models are often padded, so theirs is the larger one.
        size = max(self.vocab_size, max(self._hub_tokenizer.tokens()) + 1)
        return LLTokenizer(self._hub_tokenizer.to_json(), size, self.end_tokens)

    def prepare(self) -> None:
        """Read the library's tokenizer, which takes up to seconds. Errors are raised when a grammar is compiled."""
        with suppress(Exception):
            _ = self.tokenizer

    def start(self, grammar: Grammar) -> GrammarState:
        """Return the state before the first token. Raises UserError for a grammar that cannot be used."""
        compiled = self._kept.pop(grammar, None) or self._checked(grammar)
        self._kept[grammar] = compiled
        while sum(each.spent_s for each in self._kept.values()) > MAX_KEPT_S:
            self._kept.popitem(last=False)
        return GrammarState(self, compiled, compiled.matcher.deep_copy())

    def _checked(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar that allows at least one token. Raises UserError, whatever fails."""
        began = thread_time()
        try:
            compiled = self._compile(grammar, SHARED_FUEL)
            GrammarState(self, compiled, compiled.matcher).allowed()
        except UserError:
            raise
        except Exception as problem:
            LOG.exception("A grammar of the kind %s failed with %s", grammar.kind, type(problem).__name__)
            raise _refused(grammar, f"{type(problem).__name__}: {problem}") from None
        compiled.spent_s = thread_time() - began
        return compiled

    def renew(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar again after its automaton has reached a limit. The result must not be shared."""
        self._kept.pop(grammar, None)
        return self._compile(grammar, OWN_FUEL)

    def _compile(self, grammar: Grammar, fuel: int) -> CompiledGrammar:
        try:
            import llguidance
        except ImportError:
            raise missing_extra(f"{grammar.kind} needs the library llguidance on the server", "grammar") from None
        if not self.end_tokens:
            raise UserError(f"{grammar.kind} needs a model with an end token")
        limits = llguidance.LLParserLimits(step_lexer_fuel=fuel, max_lexer_states=MAX_STATES)
        try:
            matcher = llguidance.LLMatcher(self.tokenizer, definition(grammar), log_level=0, limits=limits)
        except ValueError as problem:
            raise _refused(grammar, str(problem)) from None
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        return CompiledGrammar(grammar, matcher)


def _refused(grammar: Grammar, reason: str) -> UserError:
    line = " ".join(reason.split())
    return UserError(f"{grammar.kind}: it cannot be used: {line[:MAX_MESSAGE]}")


def _cannot_continue(grammar: Grammar, reason: str) -> str:
    """Return the message of an error. reason: the library's message, followed by lines about its state."""
    line = reason.partition("\n")[0][:MAX_MESSAGE]
    if line in ("", NOTHING_ALLOWED):
        return f"{grammar.kind}: no token can continue the output, and it is not complete"
    return (
        f"{grammar.kind}: the output cannot be continued, because llguidance has reached one of its limits: {line}; "
        "use smaller repetitions, or fewer alternatives with the same beginning"
    )
