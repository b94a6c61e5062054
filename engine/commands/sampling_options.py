"""Options for sampling, with the names of the fields of `SamplingParams`.

`SamplingParams` checks ranges; this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ssd.errors import UserError


def _biases(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[int, float]:
    """Parse each `TOKEN=BIAS`. Raises UserError."""
    biases = {}
    for text in given:
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise UserError(f"logit-bias must be a token id and a number, such as 42=-100, not {text!r}") from None
    return biases


OPTIONS = (
    click.option("--max-tokens", type=int, default=128, help="Most tokens in an output."),
    click.option("--min-tokens", type=int, default=0, help="Least tokens in an output."),
    click.option("--temperature", type=float, default=0.0, help="0 is greedy decoding."),
    click.option("--top-k", type=int, default=0, help="Sample from this many most likely tokens; 0 is all."),
    click.option(
        "--top-p", type=float, default=1.0, help="Sample from the likeliest tokens that hold this probability."
    ),
    click.option("--min-p", type=float, default=0.0, help="Least probability, as a share of the likeliest token's."),
    click.option(
        "--repetition-penalty", type=float, default=1.0, help="Above 1, tokens of prompt and output are less likely."
    ),
    click.option(
        "--presence-penalty",
        type=float,
        default=0.0,
        help="-2 to 2, subtracted from the logits of tokens in the output.",
    ),
    click.option("--frequency-penalty", type=float, default=0.0, help="The same for each occurrence in the output."),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="TOKEN=BIAS",
        callback=_biases,
        help="Add -100 to 100 to the logits of a token id; may be given again.",
    ),
    click.option("--seed", type=int, default=0, help="The same seed gives the same text, with any drafter."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End an output before this text; may be given again."),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        type=int,
        multiple=True,
        help="End an output at this token; may be given again.",
    ),
    click.option("--ignore-eos", is_flag=True, help="Continue after the model's end token."),
    click.option("--logprobs", type=int, help="With --output: number of alternatives to report per token, 0 to 20."),
    click.option("--prompt-logprobs", type=int, help="The same for the prompt's tokens after the first."),
)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command
