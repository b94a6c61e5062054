"""Say whether the installed vLLM would get drafts, before a server is started.

    python -m drafter_service.plugins.vllm check [flags of `vllm serve`]

The exit status is 0 if it would, and the sidecar answers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from drafter_service.client import DrafterClient
from drafter_service.plugins.settings import EMBEDDED, PluginSettings
from drafter_service.plugins.vllm.engine import settings_of
from drafter_service.plugins.vllm.variants import Choice, Variant, check_version, choose
from ssd.errors import UserError

USAGE = "usage: python -m drafter_service.plugins.vllm check [flags of `vllm serve`]"


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    wants_help = bool({"-h", "--help"} & set(arguments))
    if arguments[:1] != ["check"]:
        print(USAGE)
        return 0 if wants_help else 2
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
    except ImportError as problem:
        print(USAGE if wants_help else f"vLLM cannot be imported: {problem}; run this in vLLM's environment")
        return 0 if wants_help else 1
    print(f"vLLM {vllm.__version__}")
    if (choice := check_version(vllm.__version__)) is not None:
        return report(choice)
    try:
        config = engine_config(arguments[1:])
    except (RuntimeError, ValueError) as problem:
        print(f"vLLM refuses this configuration: {problem}")
        if "adaptive verification" in str(problem).lower():
            print("without enable_adaptive_verification all requests of a step verify the same number of draft tokens")
        return 1
    choice = choose(config)
    return report(choice) or report_sidecar(config)


def engine_config(flags: Sequence[str]) -> Any:
    """Return the `VllmConfig` that `vllm serve` makes of its flags.

    Raises ValueError if vLLM refuses them, and RuntimeError if it finds no device.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = make_arg_parser(FlexibleArgumentParser(prog="check")).parse_args(list(flags))
    given.model = getattr(given, "model_tag", None) or given.model
    return AsyncEngineArgs.from_cli_args(given).create_engine_config()


def report(choice: Choice) -> int:
    """Print a choice; return the exit status."""
    if choice.variant is Variant.NONE:
        print(f"drafts: none; {'the server would not start' if choice.is_error else 'it would serve without them'}")
        print(f"why: {choice.reason}")
        return 1
    print(f"drafts: in the {choice.variant.value}")
    print(f"why: {choice.reason}")
    return 0


def report_sidecar(config: Any) -> int:
    """Print where drafts would come from, and whether it answers; return the exit status."""
    try:
        settings = settings_of(config.model_config, print)
        print(f"sidecar: {settings.sidecar}: {answer_of(settings)}")
    except UserError as problem:
        print(f"sidecar: {problem}")
        return 1
    return 0


def answer_of(settings: PluginSettings) -> str:
    """Return what a sidecar answers. Raises UserError if it refuses this model, or nothing answers."""
    if settings.sidecar == EMBEDDED:
        return "a corpus in vLLM's own process"
    with DrafterClient(
        settings.sidecar, model=settings.model, namespace=settings.namespace, access=settings.access
    ) as client:
        if client.welcome is None:
            return "connected"
        state = client.welcome.namespace_state
        advice = state.advice('set "namespace" to "{}"')
        return f"connected, namespace {state}" + (f"\nwarning: {advice}" if advice else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
