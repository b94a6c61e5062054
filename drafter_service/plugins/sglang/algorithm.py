"""The algorithm `SSD` among SGLang's speculative algorithms, and the arguments of a server that uses it.

Each process of each SGLang server loads this module where the package is installed, whatever algorithm it runs. So the
client and what it needs are imported only where the algorithm is used.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

ALGORITHM = "SSD"

TESTED = ("0.5.23",)
"""Versions of SGLang."""

NODES = 12
"""Default of K, the nodes that are verified per request and step, as for the host's NGRAM."""

MAX_REQUESTS = 48
"""Default of the requests that run at a time, as for the host's NGRAM."""

DEVICES = ("cuda", "cpu", "xpu")
"""Devices on which the host verifies drafts of NGRAM."""

OWN_METHODS = ("create_worker", "handle_server_args")
"""Methods of the algorithm that are not those of the host's NGRAM."""


def register() -> None:
    """Register the algorithm; the host calls this in each of its processes."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    SpeculativeAlgorithm.register(
        ALGORITHM, supports_overlap=True, validate_server_args=check_server_args, spec_class=algorithm_class()
    )(make_worker_class)


def make_worker_class(server_args: Any) -> type:  # noqa: ARG001
    """Return the class of the workers."""
    from drafter_service.plugins.sglang.worker import worker_class

    return worker_class()


def check_server_args(server_args: Any) -> None:
    """Raise ValueError, before the model is loaded, for a version or arguments of the host that are not supported."""
    from drafter_service.plugins.settings import look_for_sidecar, read_settings, untested
    from drafter_service.plugins.sglang.worker import LOG
    from ssd.config import MAX_DRAFT
    from ssd.errors import UserError

    nodes = server_args.speculative_num_draft_tokens
    reasons = {
        f"--speculative-num-draft-tokens must be 2 to {MAX_DRAFT + 1}, not {nodes}": (
            nodes is not None and not 2 <= nodes <= MAX_DRAFT + 1
        ),
        f"--device must be {' or '.join(DEVICES)}": server_args.device not in DEVICES,
        "--enable-dp-attention is not supported": server_args.enable_dp_attention,
        "--pipeline-parallel-size above 1 is not supported": server_args.pp_size > 1,
        "--speculative-ngram-external-corpus-path is for NGRAM; use ssd-drafter warm": (
            server_args.speculative_ngram_external_corpus_path is not None
        ),
    }
    reason = untested("SGLang", version("sglang"), TESTED)
    reason = reason or next((reason for reason, applies in reasons.items() if applies), "")
    try:
        look_for_sidecar(read_settings({}), LOG.warning)
    except UserError as problem:
        reason = reason or str(problem)
    if reason:
        raise ValueError(f"--speculative-algorithm {ALGORITHM}: {reason}")


def set_defaults(server_args: Any) -> None:
    """Set the arguments that the host sets for its NGRAM. Raises ValueError for trees that it cannot verify."""
    nodes = server_args.speculative_num_draft_tokens or NODES
    width = server_args.speculative_eagle_topk or 1
    # As the host refuses its own trees.
    if width > 1 and (server_args.page_size or 1) > 1 and server_args.attention_backend != "flashinfer":
        raise ValueError(
            f"--speculative-algorithm {ALGORITHM}: --speculative-eagle-topk {width} needs --page-size 1 or "
            "--attention-backend flashinfer"
        )
    server_args.speculative_num_draft_tokens = nodes
    server_args.speculative_eagle_topk = width
    server_args.speculative_num_steps = nodes - 1 if width == 1 else max(1, nodes // width)
    server_args.max_running_requests = server_args.max_running_requests or MAX_REQUESTS
    server_args.enable_mixed_chunk = False
    if server_args.device == "cpu":  # The host does not overlap steps there.
        server_args.disable_overlap_schedule = True


def algorithm_class() -> type:
    """Return the class of the algorithm, which answers the host's questions as its NGRAM does."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    def as_ngram(name: str) -> Any:
        return lambda _, *args, **kwargs: getattr(SpeculativeAlgorithm.NGRAM, name)(*args, **kwargs)

    methods: dict[str, Any] = {
        name: as_ngram(name)
        for name, value in vars(SpeculativeAlgorithm).items()
        if inspect.isfunction(value) and not name.startswith("_") and name not in OWN_METHODS
    }
    methods["handle_server_args"] = lambda _, server_args: set_defaults(server_args)
    return type("SsdAlgorithm", (CustomSpecAlgo,), methods)
