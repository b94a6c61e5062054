"""Measure whether the time of a missing or refused draft depends on what other namespaces contain.

`python -m benchmarks.isolation` starts a service with two tenants. One of them requests drafts of contexts that the
other's namespace has learned, and of contexts that nobody has sent; its own namespace has neither. It also opens
streams for the other's namespace and for one that does not exist, which are both refused. The last line of the output
is one JSON document.

What a time reveals is given as the probability that a pair of times, one of each kind, is ordered: 0.5 is nothing,
1 everything (the area under the ROC curve), with its 95 % interval.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.support.command import new_parser, positive, print_document
from benchmarks.support.sidecar_load import texts_message
from benchmarks.support.text import REQUEST_TOKENS, VOCABULARY, Writer
from drafter_service.auth.callers import sha256_of
from drafter_service.auth.connector import ClientAccess
from drafter_service.client import DrafterClient
from drafter_service.observability.measuring.sidecar import running_sidecar
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.wire import PROTOCOL
from ssd.types import Progress

OWN_SEED, OTHER_SEED, UNKNOWN_SEED = 1, 2, 3
CONTEXT = 64
MAX_DRAFT = 16
DEADLINE_S = 10.0
RESAMPLES = 1000
WARM_UP = 100
LEARNED_AT_ONCE = 200
"""Texts in one Observe call."""


class Tenant:
    """A caller with every right to a namespace of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.token = secrets.token_urlsafe()
        self.token_file = folder / f"{name}.token"
        self.token_file.write_text(self.token)
        self.token_file.chmod(0o600)

    @property
    def entry(self) -> str:
        """Its entry in the file of callers."""
        return (
            f'[[caller]]\nname = "{self.name}"\ntoken_sha256 = "{sha256_of(self.token)}"\n'
            f'namespaces = ["{self.name}"]\nrights = ["read", "learn", "admin"]\n'
        )

    def learn(self, address: str, texts: list[np.ndarray]) -> None:
        """Send texts to the service, and wait until they are draftable: forgetting an unknown name waits for all."""
        with grpc.insecure_channel(address) as channel:
            stub = DrafterServiceStub(channel)
            for first in range(0, len(texts), LEARNED_AT_ONCE):
                message = texts_message(texts[first : first + LEARNED_AT_ONCE])
                stub.Observe(pb.ObserveRequest(namespace=self.name, texts=message), metadata=self.metadata)
            stub.Forget(pb.ForgetRequest(namespace=self.name, request_id="unknown"), metadata=self.metadata)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of its calls."""
        return (("authorization", f"Bearer {self.token}"),)

    def client(self, address: str) -> DrafterClient:
        """Return a client of its namespace."""
        access = ClientAccess(token=self.token_file)
        return DrafterClient(address, namespace=self.name, access=access, deadline_s=DEADLINE_S)


def different_tokens(seed: int, count: int) -> list[np.ndarray]:
    """Return texts of REQUEST_TOKENS tokens, uint32, that texts of other seeds and of `Writer` do not have.

    No token occurs twice in a text, so that nothing can be drafted from the text itself.
    """
    rng = np.random.default_rng(seed)
    texts = (rng.permutation(VOCABULARY)[:REQUEST_TOKENS] for _ in range(count))
    return [(text + seed * VOCABULARY).astype(np.uint32) for text in texts]


def timed_draft(client: DrafterClient, context: np.ndarray) -> tuple[float, int]:
    """Return the seconds until a new sequence has its first draft, and the draft's length."""
    began = time.perf_counter()
    client.start(1, context, learn=False)
    drafts = client.draft(Progress.of_one(1, np.empty(0, np.uint32), max_draft=MAX_DRAFT))
    seconds = time.perf_counter() - began
    client.finish(1, np.empty(0, np.uint32), learn=False)
    return seconds, len(drafts.tokens)


def timed_refusal(stub: DrafterServiceStub, tenant: Tenant, namespace: str) -> float:
    """Return the seconds until a stream for a namespace is refused."""
    hello = pb.DraftRequest(hello=pb.Hello(protocol=PROTOCOL, namespace=namespace))
    began = time.perf_counter()
    try:
        next(stub.Draft(iter([hello]), metadata=tenant.metadata))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            return time.perf_counter() - began
        raise
    raise RuntimeError("the stream was not refused")


def in_random_order(measure: Callable[[Any], float], kinds: Sequence[Sequence[Any]], seed: int) -> list[np.ndarray]:
    """Measure the items of two kinds in a random order; return the seconds of each kind."""
    order = np.random.default_rng(seed).permutation([0] * len(kinds[0]) + [1] * len(kinds[1]))
    remaining = [iter(kind) for kind in kinds]
    seconds: list[list[float]] = [[], []]
    for kind in order.tolist():
        seconds[kind].append(measure(next(remaining[kind])))
    return [np.array(each) for each in seconds]


def revealed(first: np.ndarray, second: np.ndarray) -> dict[str, Any]:
    """Return medians of two kinds of times, and the probability that they tell the kinds apart."""
    rng = np.random.default_rng(0)
    samples = [ordered(rng.choice(first, len(first)), rng.choice(second, len(second))) for _ in range(RESAMPLES)]
    low, high = np.percentile(samples, (2.5, 97.5))
    return {
        "median_us": [round(1e6 * float(np.median(each)), 1) for each in (first, second)],
        "ordered": round(ordered(first, second), 3),
        "interval": [round(float(low), 3), round(float(high), 3)],
    }


def ordered(first: np.ndarray, second: np.ndarray) -> float:
    """Return the probability that a time of the first kind is less than one of the second; ties count half."""
    second = np.sort(second)
    below = np.searchsorted(second, first, "left") + np.searchsorted(second, first, "right")
    return float(1 - below.mean() / (2 * len(second)))


def measure(folder: Path, tokens: int, probes: int) -> dict[str, Any]:
    """Return what the times reveal."""
    own, other = Tenant(folder, "own"), Tenant(folder, "other")
    callers = folder / "callers.toml"
    callers.write_text(own.entry + other.entry)
    known, unknown = (
        different_tokens(OTHER_SEED, max(probes, tokens // REQUEST_TOKENS)),
        different_tokens(UNKNOWN_SEED, probes),
    )
    kinds = [[text[:CONTEXT] for text in texts[:probes]] for texts in (known, unknown)]
    with running_sidecar("--callers", str(callers), "--capacity", "4M") as (address, _):
        own.learn(address, Writer(OWN_SEED).take(tokens))
        other.learn(address, known)
        with own.client(address) as client, other.client(address) as control:
            lengths: dict[str, list[int]] = {"missing": [], "control": []}

            def draft(tenant: DrafterClient, name: str) -> Callable[[np.ndarray], float]:
                def timed(context: np.ndarray) -> float:
                    seconds, length = timed_draft(tenant, context)
                    lengths[name].append(length)
                    return seconds

                return timed

            for each, name in ((client, "missing"), (control, "control")):  # Warm up.
                in_random_order(draft(each, name), [part[:WARM_UP] for part in kinds], seed=0)
            missing = in_random_order(draft(client, "missing"), kinds, seed=1)
            found = in_random_order(draft(control, "control"), kinds, seed=2)
        with grpc.insecure_channel(address) as channel:
            stub = DrafterServiceStub(channel)
            names = [["other"] * probes, ["absent"] * probes]
            refused = in_random_order(lambda name: timed_refusal(stub, own, name), names, seed=3)
    if any(lengths["missing"]):
        raise RuntimeError("a draft has text of another namespace")
    return {
        "probes": probes,
        "missing draft: known to the other tenant, known to nobody": revealed(*missing),
        "refused stream: namespace of the other tenant, no such namespace": revealed(*refused),
        "control, within the other tenant's namespace: known, unknown": revealed(*found),
        "control: share of contexts with a draft": round(float(np.mean(np.array(lengths["control"]) > 0)), 3),
    }


def main() -> None:
    """Measure and print the results."""
    parser = new_parser("isolation", __doc__)
    parser.add_argument("--tokens", type=positive, default=500_000, help="tokens in each namespace")
    parser.add_argument("--probes", type=positive, default=2000, help="times of each kind")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        result = measure(Path(folder), options.tokens, options.probes)
    for name, value in result.items():
        print(f"{name}: {value}")
    print_document(result)


if __name__ == "__main__":
    main()
