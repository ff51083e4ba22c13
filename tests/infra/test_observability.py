"""infra/observability: promtool checks it, and a real Prometheus scrapes a real campaign
with it.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import requests
import yaml
from prometheus_client import CollectorRegistry

from freezer.hardware import PORTABLE
from freezer.store import Store
from infra.serving.model_server import ServingMetrics
from pipeline.records import Event, LiveFigures
from pipeline.reporting import Display, campaign_status
from pipeline.reporting.metrics import CampaignMetrics
from tests.conftest import Frozen
from tests.support.campaign_runs import CATALOG, environment, write_catalog
from tests.support.commands import output
from tests.support.markdown import anchors
from tests.support.outcomes import failed
from tests.support.raylets import LOOPBACK, ROOT, free_port, wait_until
from tests.support.scrapes import Scrape, scraped, summed
from tests.support.services import X, json_of, publish, start_service, with_golden
from tests.support.steps import HERE

FOLDER = ROOT / "infra" / "observability"

needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
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
    said = output("promtool", "check", "config", tmp_path / name)
    assert "SUCCESS: 5 rules found" in said


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


def alert(name: str) -> str:
    """The expression of an alert."""
    (expression,) = (rule["expr"] for rule in ALERTS if rule["alert"] == name)
    return str(expression)


def test_alerts_link_to_sections_of_the_runbook() -> None:
    """At one placeholder, which users replace by the address of their copy."""
    sections = anchors((ROOT / "infra" / "README.md").read_text())
    page = "https://git.example/coldpress/blob/main/infra/README.md#"
    assert {rule["annotations"]["runbook_url"] for rule in ALERTS} <= {
        page + section for section in sections
    }


def queries(**variables: str) -> dict[str, list[str]]:
    """The queries of each panel, with Grafana's variables replaced."""
    values = {"__rate_interval": "5m", "__range": "6h", "campaign": ".*", "instance": ".*"}
    values |= variables

    def replaced(query: str) -> str:
        return re.sub(r"\$(\w+)", lambda name: values[name[1]], query)

    return {
        panel["title"]: [replaced(target["expr"]) for target in panel["targets"]]
        for panel in PANELS
    }


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
    every = [query for of_panel in queries().values() for query in of_panel]
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


@dataclass(frozen=True)
class Prometheus:
    """A server with the alerts of the repository, at an address."""

    address: str

    def query(self, query: str, at: float | None = None) -> list[dict[str, Any]]:
        """The samples of a query, now or at a time."""
        parameters: dict[str, str | float] = {"query": query, "time": at or time.time()}
        url = f"http://{self.address}/api/v1/query"
        answer = requests.get(url, params=parameters, timeout=30).json()
        assert answer["status"] == "success", answer
        return answer["data"]["result"]

    def numbers(self, query: str, label: str) -> dict[str, float]:
        """The values of a query above 0, by a label."""
        samples = self.query(query)
        values = {sample["metric"][label]: float(sample["value"][1]) for sample in samples}
        return {name: value for name, value in values.items() if value}

    def check_panels(self, at: float, *, of_serving: bool, **variables: str) -> None:
        """Every query of every panel of campaigns, or of serving, has numbers."""
        every = [query for of_panel in queries(**variables).values() for query in of_panel]
        for query in every:
            if ("coldpress_serving_" in query) == of_serving:
                values = [float(sample["value"][1]) for sample in self.query(query, at)]
                assert values, query
                assert all(map(math.isfinite, values)), f"{query}: {values}"


def is_ready(address: str) -> bool:
    try:
        return requests.get(f"http://{address}/-/ready", timeout=5).ok
    except requests.ConnectionError:
        return False


@contextmanager
def scraping(folder: Path, job: str, port: int) -> Iterator[Prometheus]:
    """Run a server that scrapes a port by the repository's configuration of a job, twice a
    second.
    """
    server = Prometheus(f"{LOOPBACK}:{free_port()}")
    configuration = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    configuration["global"] = {
        "scrape_interval": "500ms",
        "scrape_timeout": "500ms",
        "evaluation_interval": "1s",
    }
    jobs = {scrape["job_name"]: scrape for scrape in configuration["scrape_configs"]}
    targets = [{"targets": [f"{LOOPBACK}:{port}"]}]
    configuration["scrape_configs"] = [jobs[job] | {"static_configs": targets}]
    folder.mkdir()
    shutil.copy(FOLDER / "alerts.yml", folder)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    command.append(f"--web.listen-address={server.address}")
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: is_ready(server.address), "Prometheus is ready")
            yield server
        finally:
            process.terminate()


def optimized(folder: Path, port: int) -> tuple[list[Scrape], float]:
    """Run a campaign of a good and three bad models; return its metrics several times a second, and
    when they ended.
    """
    write_catalog(folder, CATALOG)
    command = [sys.executable, "-m", "jobs.optimize", "catalog.yaml", "--accept-noise"]
    command += ["--store", "store", "--tracking-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--metrics", f"{LOOPBACK}:{port}"]
    scrapes: list[Scrape] = []
    last = 0.0
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment(folder), cwd=folder, stdout=log, stderr=log
        )
        while process.poll() is None:
            try:
                scrapes.append(scraped(port))
                last = time.time()
            except (URLError, ConnectionError):
                if scrapes:  # it serves until it ends
                    process.wait(30)
            time.sleep(0.2)
    assert process.returncode == 1, (folder / "log").read_text()
    return scrapes, last


@needs_prometheus
@pytest.mark.cluster
@pytest.mark.slow
def test_prometheus_shows_what_the_ledger_has(tmp_path: Path) -> None:
    port = free_port()
    with scraping(tmp_path / "prometheus", "coldpress-driver", port) as prometheus:
        scrapes, last = optimized(tmp_path / "campaign", port)
        status = campaign_status(Store.open(str(tmp_path / "campaign" / "store")), "catalog")

        def last_scraped(name: str, label: str) -> dict[str, float]:
            return summed(scrapes[-1], name, label)

        def recorded(name: str, label: str) -> dict[str, float]:
            return prometheus.numbers(f"sum by ({label}) (last_over_time({name}[10m]))", label)

        codes = dict.fromkeys(("CP-WEIGHTS-DIFFER", "CP-SOURCE", "CP-TIMEOUT"), 1)
        for found in (last_scraped, recorded):
            assert found("coldpress_outcomes_total", "verdict") == status.verdicts
            assert found("coldpress_failures_total", "code") == codes
            assert found("coldpress_items", "state") == {"final": status.planned}
            assert found("coldpress_mlflow_backlog", "campaign") == {}
            assert found("coldpress_mlflow_logged_total", "campaign") == {"catalog": status.reached}
            assert found("coldpress_nodes", "device_class")[PORTABLE] == 1
        in_flight = [summed(scrape, "coldpress_steps_in_flight", "step") for scrape in scrapes]
        assert {step for found in in_flight for step in found} == {"build", "judge"}
        assert max(found.get("judge", 0) for found in in_flight) == 1, "a judge runs alone"
        num_ended = summed(scrapes[-1], "coldpress_build_seconds_count")["catalog"]
        assert num_ended == status.built + status.builds_failed
        prometheus.check_panels(last, of_serving=False, campaign="catalog")
        (failing,) = prometheus.query(alert("ColdpressFailuresRise"), last)
        assert failing["metric"] == {"campaign": "catalog"}


@needs_prometheus
@pytest.mark.slow
def test_prometheus_shows_what_a_service_does(
    store: Store, scripted: Frozen, tmp_path: Path
) -> None:
    """It answers, refuses an input and a version, and dies."""
    port = free_port()
    not_ready = alert("ColdpressServingNotReady")
    with (
        scraping(tmp_path / "prometheus", "coldpress-serving", port) as prometheus,
        start_service("mlp", store.uri, port, "--device-class", HERE, "--reload-s", "1") as process,
    ):
        try:
            wait_until(
                lambda: prometheus.query('coldpress_serving_artifact_info{digest!=""}'),
                "the artifact is scraped",
            )
            assert prometheus.query(not_ready) == []
            for body in [*[json_of(X)] * 20, b"{}"]:
                requests.post(f"http://{LOOPBACK}:{port}/predict", data=body, timeout=60)
            publish(store, with_golden(scripted.artifact, tmp_path / "wrong", error=1.0))
            wait_until(lambda: prometheus.query(not_ready), "the canary's failure is scraped")
            found = prometheus.numbers("coldpress_serving_requests_total", "outcome")
            assert found == {"ok": 20, "invalid": 1}
            prometheus.check_panels(time.time(), of_serving=True)
        finally:
            process.kill()
        wait_until(lambda: prometheus.query("up == 0"), "its end is noticed")
        assert {one["metric"]["job"] for one in prometheus.query(not_ready)} == {
            "coldpress-serving"
        }
