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

from benchmarks.support import new_parser, positive, report
from benchmarks.support.load import LONG_DEADLINE_S, REQUEST_TOKENS, VOCABULARY, Writer, fill
from drafter_service.auth.callers import sha256_of
from drafter_service.auth.connector import ClientAccess
from drafter_service.client import DrafterClient
from drafter_service.observability.measuring.sidecar import running_sidecar
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.wire import PROTOCOL
from ssd.types import Progress

OWN_SEED, OTHER_SEED, UNKNOWN_SEED = 1, 2, 3
CONTEXT, MAX_DRAFT = 64, 16
NO_TOKENS = np.empty(0, np.uint32)
RESAMPLES = 1000
WARM_UP = 100


class Tenant:
    """A caller with every right to a namespace of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        token = secrets.token_urlsafe()
        self.name, self.token_file = name, folder / f"{name}.token"
        self.token_file.write_text(token)
        self.token_file.chmod(0o600)
        self.metadata = (("authorization", f"Bearer {token}"),)
        """Metadata of its calls."""
        self.entry = (
            f'[[caller]]\nname = "{name}"\ntoken_sha256 = "{sha256_of(token)}"\n'
            f'namespaces = ["{name}"]\nrights = ["read", "learn", "admin"]\n'
        )
        """Its entry in the file of callers."""

    def client(self, address: str) -> DrafterClient:
        """Return a client of its namespace."""
        access = ClientAccess(token=self.token_file)
        return DrafterClient(address, namespace=self.name, access=access, deadline_s=LONG_DEADLINE_S)

    def timed_refusal(self, stub: DrafterServiceStub, namespace: str) -> float:
        """Return the seconds until a stream for a namespace is refused."""
        hello = pb.DraftRequest(hello=pb.Hello(protocol=PROTOCOL, namespace=namespace))
        began = time.perf_counter()
        try:
            next(stub.Draft(iter([hello]), metadata=self.metadata))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                return time.perf_counter() - began
            raise
        raise RuntimeError("the stream was not refused")


def timed_draft(client: DrafterClient, context: np.ndarray, lengths: list[int]) -> float:
    """Return the seconds until a new sequence has its first draft, and append the draft's length."""
    began = time.perf_counter()
    client.start(1, context, learn=False)
    drafts = client.draft(Progress.of_one(1, NO_TOKENS, max_draft=MAX_DRAFT))
    seconds = time.perf_counter() - began
    client.finish(1, NO_TOKENS, learn=False)
    lengths.append(len(drafts.tokens))
    return seconds


def different_tokens(seed: int, count: int) -> list[np.ndarray]:
    """Return texts of REQUEST_TOKENS tokens, uint32, that texts of other seeds and of `Writer` do not have.

    No token occurs twice in a text, so that nothing can be drafted from the text itself.
    """
    rng = np.random.default_rng(seed)
    texts = (rng.permutation(VOCABULARY)[:REQUEST_TOKENS] for _ in range(count))
    return [(text + seed * VOCABULARY).astype(np.uint32) for text in texts]


def in_random_order(measure: Callable[[Any], float], kinds: Sequence[Sequence[Any]], seed: int) -> list[np.ndarray]:
    """Measure the items of two kinds in a random order; return the seconds of each kind."""
    order = np.random.default_rng(seed).permutation(np.repeat([0, 1], len(kinds[0]))).tolist()
    remaining = [iter(kind) for kind in kinds]
    times = [(kind, measure(next(remaining[kind]))) for kind in order]
    return [np.array([seconds for of, seconds in times if of == kind]) for kind in (0, 1)]


def revealed(first: np.ndarray, second: np.ndarray) -> dict[str, Any]:
    """Return medians of two kinds of times, and the probability that they tell the kinds apart."""
    rng = np.random.default_rng(0)
    samples = [ordered(rng.choice(first, len(first)), rng.choice(second, len(second))) for _ in range(RESAMPLES)]
    return {
        "median_us": [round(1e6 * float(np.median(each)), 1) for each in (first, second)],
        "ordered": round(ordered(first, second), 3),
        "interval": np.percentile(samples, (2.5, 97.5)).round(3).tolist(),
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
    known = different_tokens(OTHER_SEED, max(probes, tokens // REQUEST_TOKENS))
    texts = (known[:probes], different_tokens(UNKNOWN_SEED, probes))
    kinds = [[text[:CONTEXT] for text in each] for each in texts]
    times: dict[str, list[np.ndarray]] = {}
    lengths: dict[str, list[int]] = {"own": [], "other": []}
    with running_sidecar("--callers", str(callers), "--capacity", "4M") as (address, _):
        fill(address, Writer(OWN_SEED).take(tokens), own.name, metadata=own.metadata)
        fill(address, known, other.name, metadata=other.metadata)
        for tenant in (own, other):
            with tenant.client(address) as client:

                def draft(context: np.ndarray, client: DrafterClient = client, name: str = tenant.name) -> float:
                    return timed_draft(client, context, lengths[name])

                in_random_order(draft, [part[:WARM_UP] for part in kinds], seed=0)
                lengths[tenant.name].clear()
                times[tenant.name] = in_random_order(draft, kinds, seed=1)
        with grpc.insecure_channel(address) as channel:
            stub, names = DrafterServiceStub(channel), [["other"] * probes, ["absent"] * probes]
            refused = in_random_order(lambda name: own.timed_refusal(stub, name), names, seed=3)
    if any(lengths["own"]):
        raise RuntimeError("a draft has text of another namespace")
    return {
        "probes": probes,
        "missing draft: known to the other tenant, known to nobody": revealed(*times["own"]),
        "refused stream: namespace of the other tenant, no such namespace": revealed(*refused),
        "control, within the other tenant's namespace: known, unknown": revealed(*times["other"]),
        "control: share of contexts with a draft": round(float(np.mean(np.array(lengths["other"]) > 0)), 3),
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
    report(result, options.out)


if __name__ == "__main__":
    main()
