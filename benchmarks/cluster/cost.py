"""The cost of replication: processor time and network traffic for each token that one sidecar learns."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.cluster.learned import observe
from benchmarks.cluster.topology import Cluster
from benchmarks.support.sidecar_load import NAMESPACE, Feed
from drafter_service.stubs import drafter_pb2 as pb

TOKENS_PER_S, SECONDS = 200_000, 8.0
"""Text that the first sidecar learns."""
CATCH_UP_S = 1.0

Document = dict[str, Any]


def measure_cost(cluster: Cluster) -> Document:
    """Let the first sidecar learn text that nobody drafts; return what that costs each process.

    Every sidecar reads the whole log, including what it has written itself.
    """
    first, second = cluster.nodes
    for node in cluster.nodes:
        observe(node.address, np.arange(32, dtype=np.uint32), namespace=NAMESPACE)
    processes = {"first sidecar": first.sidecar, "Redis": cluster.redis, "second sidecar": second.sidecar}
    before = {name: process.usage().cpu_s for name, process in processes.items()}
    bytes_before = [node.link.bytes for node in cluster.nodes]
    began = time.monotonic()
    with Feed(first.address, TOKENS_PER_S) as feed:
        time.sleep(SECONDS)
    time.sleep(CATCH_UP_S)
    seconds = time.monotonic() - began
    result = {
        "tokens_per_s": round(feed.tokens / seconds),
        "cpu_us_per_token": {
            name: round((process.usage().cpu_s - before[name]) / feed.tokens * 1e6, 3)
            for name, process in processes.items()
        },
        "bytes_per_token": {
            name: round((node.link.bytes - earlier) / feed.tokens, 2)
            for name, node, earlier in zip(
                ("first sidecar", "second sidecar"), cluster.nodes, bytes_before, strict=True
            )
        },
    }
    for node in cluster.nodes:
        with node.stub() as stub:
            stub.DropNamespace(pb.DropNamespaceRequest(namespace=NAMESPACE))
    return result
