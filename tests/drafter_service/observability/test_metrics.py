"""Prometheus metrics: values, sums, documentation and the endpoint."""

import asyncio
import errno
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from contextlib import contextmanager
from http.client import RemoteDisconnected
from pathlib import Path
from socketserver import ThreadingTCPServer
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.error import HTTPError

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from drafter_service.observability import metrics
from drafter_service.observability.facts import BOUNDS_S, Engine, EngineUse
from drafter_service.observability.metrics import (
    BUCKETS,
    KEPT_S,
    DrafterCollector,
    MetricsEndpoint,
    buckets,
    facts_from_loop,
)
from drafter_service.observability.report.schema import SharedLogReport
from ssd.budget.totals import BudgetTotals
from ssd.errors import UserError
from ssd.stats import ACCEPTED, VERIFIED, Stats
from tests.drafter_service.observability.report.samples import busy_namespace, durations, service

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
LOG = SharedLogReport(
    published_tokens=11, consumed_tokens=12, dropped_tokens=14, malformed=17, gaps=18, is_connected=True, lag_s=1.5
)


def metered(*namespaces, log=LOG):
    """Return facts of a service."""
    return service(*namespaces, version="1.2.3", refused=9, log=log)


@contextmanager
def scraped(facts):
    """Serve metrics, and yield a function that fetches them over HTTP."""
    endpoint = MetricsEndpoint(facts, "127.0.0.1:0")
    endpoint.start()
    try:
        yield lambda: fetch(endpoint)
    finally:
        endpoint.stop()


def fetch(endpoint):
    with urllib.request.urlopen(f"http://{endpoint.address.text}/metrics", timeout=10) as answer:
        return answer.read().decode()


def samples(text):
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values = {(sample.name, *sorted(sample.labels.values())): sample.value for sample in found}
    assert len(values) == len(found), "duplicate series"
    return values


def collected(collector):
    """Return values by name and label values."""
    found = [sample for family in collector.collect() for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in found}


def families(*namespaces):
    return list(DrafterCollector(lambda: metered(*namespaces)).collect())


def test_values_are_those_of_the_facts():
    """Every metric without labels of its own, over HTTP; the others have tests below."""
    budget = BudgetTotals(withheld=400)
    budget.sizes[3], budget.sizes[14] = (50, 1.5, 1.25), (1, 2.0, 3.0)
    facts = busy_namespace("main", 1_000_000, budget=budget)
    of_namespace = {
        "steps_total": facts.stats.steps,
        "hits_total": facts.stats.hits,
        "committed_tokens_total": facts.stats.committed,
        # Sums over sizes of steps.
        "recorded_steps_total": 51,
        "step_seconds_total": 3.5,
        "expected_step_seconds_total": 4.25,
        "withheld_tokens_total": 400,
        "corpus_capacity_tokens": 16_000_000,
        "corpus_tokens": 8_999_991,
        "appended_tokens_total": 9_000_000,
        "waiting_tokens": 812,
        "merges_total": 11_111,
        "memory_bytes": 196_000_000,
        "streams": 4,
        "sequences": 212,
        "client_reconnects_total": 2,
    }
    of_service = {
        "namespaces": 1,
        "refused_total": 9,
        "log_connected": 1,
        "log_lag_seconds": 1.5,
        "log_published_tokens_total": 11,
        "log_consumed_tokens_total": 12,
        "log_dropped_tokens_total": 14,
        "log_malformed_entries_total": 17,
        "log_gaps_total": 18,
    }
    with scraped(lambda: metered(facts)) as read:
        values = samples(read())
    assert {name: values[f"ssd_drafter_{name}", "main"] for name in of_namespace} == of_namespace
    assert {name: values[f"ssd_drafter_{name}",] for name in of_service} == of_service
    assert values["ssd_drafter_info", "1.2.3"] == 1
    counters = facts.stats.counters.by_source
    assert values["ssd_drafter_verified_tokens_total", "local", "main"] == counters[1, VERIFIED]
    assert values["ssd_drafter_accepted_tokens_total", "corpus", "main"] == counters[0, ACCEPTED]
    latency = [values[f"ssd_drafter_draft_latency_seconds_{name}", "main"] for name in ("count", "sum")]
    assert latency == [facts.draft_latency.count, pytest.approx(facts.draft_latency.total_s)]


def test_log_metrics_need_a_shared_log():
    values = collected(DrafterCollector(lambda: service(log=None)))
    assert not [key for key in values if "_log_" in key[0]]


@given(st.lists(st.floats(1e-7, 50) | st.sampled_from(BOUNDS_S), max_size=30))
def test_buckets_count_durations_up_to_their_bound(seconds):
    # Bucket labels have six digits, the bounds of the bins have more.
    counts = {bound: sum(each <= float(bound) * (1 + 1e-5) for each in seconds) for bound in BUCKETS}
    counted, total_s = buckets(durations(*seconds))
    assert dict(counted) == counts
    assert total_s == pytest.approx(sum(seconds))


VLLM_ENGINE = Engine("vllm/0.32.0 ssd-drafter/0.1.0", "node:1")
SGLANG_ENGINE = Engine("sglang/0.5.23", "node:2")


def used(streams, steps=0, late=0):
    """Return the use of an engine with this number of engine steps, in each of which 3 tokens were committed."""
    use = EngineUse(Stats(), streams, steps, late, offered=2 * steps)
    use.stats.record_path(3 * steps, 0, 0, steps)
    return use


def by_engine(collector):
    """Return whether each engine is connected, its engine steps, its late steps and its committed tokens."""
    names = ("connected", "steps_total", "late_steps_total", "committed_tokens_total")
    values = collected(collector)
    engines = [key[1:] for key in values if key[0] == f"ssd_drafter_engine_{names[0]}"]
    return {engine: tuple(values[f"ssd_drafter_engine_{name}", *engine] for name in names) for engine in engines}


def test_engines_of_each_namespace_are_exported_for_an_hour_after_they_were_connected():
    uses = {VLLM_ENGINE: used(1, 10, 2), SGLANG_ENGINE: used(2, 5)}
    other = busy_namespace("b", uses={VLLM_ENGINE: used(1, 1)})
    collector = DrafterCollector(lambda: metered(busy_namespace("a", uses=uses), other))
    vllm, sglang = (("a", each.host, *each) for each in (VLLM_ENGINE, SGLANG_ENGINE))
    assert by_engine(collector) == {
        vllm: (1, 10, 2, 30),
        sglang: (1, 5, 0, 15),
        ("b", VLLM_ENGINE.host, *VLLM_ENGINE): (1, 1, 0, 3),
    }
    uses[SGLANG_ENGINE].streams = 0
    uses[SGLANG_ENGINE].disconnected_at = time.monotonic() - KEPT_S + 60
    assert by_engine(collector)[sglang] == (0, 5, 0, 15)
    uses[SGLANG_ENGINE].disconnected_at -= 60
    assert sglang not in by_engine(collector)
    uses[SGLANG_ENGINE].streams = 1
    assert by_engine(collector)[sglang] == (1, 5, 0, 15)


def test_documentation_lists_every_metric():
    rows = [
        tuple(cell.strip().strip("`") for cell in line.strip("|\n ").split("|"))
        for line in OPERATIONS.read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0].splitlines()
        if line.startswith("| `")
    ]
    exported = []
    for family in families(busy_namespace(uses={VLLM_ENGINE: used(1)})):
        labels = [label for label in family.samples[0].labels if label != "le"]
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        exported.append(
            (family.name + suffix, family.type.replace("info", "gauge"), ", ".join(labels), family.documentation)
        )
    assert rows == exported, "\n".join(
        f"| `{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in exported
    )


def test_descriptions_are_sentences_with_units():
    units = {"seconds": "seconds", "bytes": "bytes", "tokens": "tokens", "requests": "requests"}
    for family in families(busy_namespace()):
        assert family.documentation.endswith("."), family.name
        for word, unit in units.items():
            if word in family.name.split("_"):
                assert unit in family.documentation.lower(), family.name


def test_promtool_accepts_the_metrics():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; apt-get install prometheus")
    with scraped(lambda: metered(busy_namespace())) as read:
        text = read()
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30)
    assert not done.stderr


def test_port_is_free_after_stop():
    endpoint = MetricsEndpoint(metered, "127.0.0.1:0")
    endpoint.start()
    used = endpoint.address.text
    with pytest.raises(UserError, match=f"reports.metrics: cannot serve at {used}: Address already in use; choose"):
        MetricsEndpoint(metered, used).start()
    endpoint.stop()
    endpoint.stop()
    with pytest.raises(OSError, match="refused"):
        fetch(endpoint)
    again = MetricsEndpoint(metered, used)
    again.start()
    assert "ssd_drafter_info" in fetch(again)
    again.stop()


@pytest.mark.parametrize(
    ("problem", "answer", "event"),
    [
        (TimeoutError("the loop is stuck"), HTTPError, "metrics not sent: the service is busy"),
        (RuntimeError("a bug"), RemoteDisconnected, "metrics not sent"),
    ],
)
def test_failures_are_logged_and_the_next_scrape_tries_again(problem, answer, event, capfd, monkeypatch):
    def facts():
        if not asked:
            asked.append(True)
            raise problem
        return metered()

    asked, logger = [], Mock()
    monkeypatch.setattr(metrics, "logger", logger)
    with scraped(facts) as read:
        with pytest.raises(answer):
            read()
        assert "ssd_drafter_info" in read()
    assert logger.warning.call_args.args == (event,)
    assert not capfd.readouterr().err


def test_without_free_descriptors_connections_are_accepted_after_a_pause(monkeypatch):
    def get_request(server):
        if pauses.count(metrics.RETRY_S) < 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(server)

    accept, pauses = ThreadingTCPServer.get_request, []
    monkeypatch.setattr(ThreadingTCPServer, "get_request", get_request)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic))
    with scraped(metered) as read:
        assert "ssd_drafter_info" in read()
    assert pauses.count(metrics.RETRY_S) == 2


def test_endpoint_serves_on_ipv6():
    try:
        socket.socket(socket.AF_INET6).bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    endpoint = MetricsEndpoint(metered, "[::1]:0")
    endpoint.start()
    assert "ssd_drafter_info" in fetch(endpoint)
    endpoint.stop()


@pytest.mark.parametrize("address", ["unix:/tmp/metrics.sock", "9400", "localhost:", "localhost:99999"])
def test_address_must_be_host_and_port(address):
    with pytest.raises(UserError):
        MetricsEndpoint(metered, address)


def test_facts_are_read_in_the_event_loop():
    threads = []

    def facts():
        threads.append(threading.current_thread())
        return metered()

    async def serve_and_read():
        with scraped(facts_from_loop(asyncio.get_running_loop(), facts)) as read:
            assert "ssd_drafter_info" in await asyncio.to_thread(read)

    asyncio.run(serve_and_read())
    assert threads == [threading.current_thread()]
