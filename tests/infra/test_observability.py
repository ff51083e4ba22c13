"""infra/observability: promtool checks it, and its queries name metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from freezer.hardware import PORTABLE
from infra.serving.model_server import ServingMetrics
from pipeline.records import Event, LiveFigures
from pipeline.reporting import Display
from pipeline.reporting.metrics import CampaignMetrics
from tests.support.commands import output
from tests.support.markdown import anchors
from tests.support.outcomes import failed
from tests.support.raylets import ROOT

FOLDER = ROOT / "infra" / "observability"

needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="Prometheus is not installed (Debian: apt-get install prometheus)",
)

TARGET = {"instance", "job"}
"""Labels that Prometheus adds."""


@needs_prometheus
@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus-kubernetes.yml"])
def test_scrape_configurations_and_alerts_are_valid(name: str, tmp_path: Path) -> None:
    """Debian's Prometheus is built without the discovery of Kubernetes, which test_kuberay.py
    compares with the manifests.
    """
    configuration = yaml.safe_load((FOLDER / name).read_text())
    for scrape in configuration["scrape_configs"]:
        scrape.pop("kubernetes_sd_configs", None)
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    (tmp_path / name).write_text(yaml.safe_dump(configuration))
    assert "SUCCESS: 6 rules found" in output("promtool", "check", "config", tmp_path / name)


def test_both_configurations_have_the_same_jobs() -> None:
    first, second = (
        yaml.safe_load((FOLDER / name).read_text())
        for name in ("prometheus.yml", "prometheus-kubernetes.yml")
    )
    names = [
        [scrape["job_name"] for scrape in configuration.pop("scrape_configs")]
        for configuration in (first, second)
    ]
    assert names[0] == names[1]
    assert first == second


@needs_prometheus
def test_alerts_fire_when_they_should() -> None:
    output("promtool", "test", "rules", "alerts_test.yml", cwd=FOLDER)


ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def test_alerts_link_to_sections_of_the_runbook() -> None:
    """At one placeholder, which users replace by the address of their copy."""
    sections = anchors((ROOT / "infra" / "README.md").read_text())
    page = "https://git.example/coldpress/blob/main/infra/README.md#"
    assert {rule["annotations"]["runbook_url"] for rule in ALERTS} <= {
        page + section for section in sections
    }


def queries() -> list[str]:
    """The queries of all panels, with Grafana's variables replaced."""
    values = {"__rate_interval": "5m", "__range": "6h", "campaign": ".*", "instance": ".*"}
    every = [target["expr"] for panel in PANELS for target in panel["targets"]]
    return [re.sub(r"\$(\w+)", lambda name: values[name[1]], query) for query in every]


def labels_by_metric(registry: CollectorRegistry) -> dict[str, set[str]]:
    """The metrics of a registry, each with its labels."""
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def known_metrics() -> dict[str, set[str]]:
    """The metrics of a driver and of a service, each with its labels."""
    driver = CampaignMetrics(Display(), "c")
    driver.observe(lambda: LiveFigures(nodes={PORTABLE: 1}))
    for kind in ("built", "judged"):
        driver.show(Event(kind=kind, what="m portable", seconds=1.0))
    driver.show(Event(kind="outcome", what="m portable", outcome=failed("m")))
    service = ServingMetrics(lambda: 0.0)
    fields = ("model", "version", "digest", "device_class")
    service.artifact.info(dict.fromkeys(fields, "x"))
    return labels_by_metric(driver.registry) | labels_by_metric(service.registry)


@needs_prometheus
def test_queries_parse_and_name_existing_metrics(tmp_path: Path) -> None:
    every = queries()
    rules = [{"record": f"query:{index}", "expr": query} for index, query in enumerate(every)]
    groups = {"groups": [{"name": "dashboard", "rules": rules}]}
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(groups))
    said = output("promtool", "check", "rules", tmp_path / "rules.yml")
    assert f"SUCCESS: {len(every)} rules found" in said
    known = known_metrics()
    for query in (*every, *(rule["expr"] for rule in ALERTS)):
        named = set(re.findall(r"coldpress_\w+", query))
        assert named <= known.keys(), query
        labels = TARGET.union(*(known[name] for name in named))
        grouped = ", ".join(re.findall(r"(?:by|on) \(([\w, ]+)\)", query))
        used = re.findall(r"\w+", grouped) + re.findall(r'(\w+)=~?"', query)
        assert set(used) <= labels, query
    for variable in DASHBOARD["templating"]["list"][1:]:
        name, label = re.findall(r"\w+", variable["query"].removeprefix("label_values"))
        assert label in known[name] | TARGET
