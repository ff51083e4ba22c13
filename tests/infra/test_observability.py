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
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import requests
import yaml

from benchmarks.serving_load import start_service
from freezer.hardware import PORTABLE
from freezer.store import Store
from infra.serving.model_server import ServingMetrics
from pipeline.records import Event, LiveFigures
from pipeline.reporting import Display, campaign_status
from pipeline.reporting.live.metrics import CampaignMetrics
from tests.conftest import Frozen
from tests.infra.test_serving import X, json_of, publish, wrong_artifact
from tests.pipeline.reporting.test_campaign_report import FAILED
from tests.support.campaign_runs import CATALOG, environment, write_catalog
from tests.support.raylets import LOOPBACK, ROOT, free_port, wait_until
from tests.support.scrapes import Scrape, scraped, summed
from tests.support.steps import HERE
from tests.test_links import anchors

FOLDER = ROOT / "infra" / "observability"

needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
    reason="Prometheus is not installed (Debian: apt-get install prometheus)",
)

SERVING = {
    "coldpress_serving_request_seconds_bucket": {"le"},
    "coldpress_serving_requests_total": {"outcome"},
    "coldpress_serving_queue_length": set[str](),
    "coldpress_serving_reloads_total": {"outcome"},
    "coldpress_serving_artifact_info": {"model", "version", "digest", "device_class"},
    "coldpress_serving_canary_failures_total": set[str](),
}
"""Metrics of infra/serving that alerts and panels may name, each with its labels."""

TARGET = {"instance", "job"}
"""Labels that Prometheus adds."""


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, check=False, cwd=FOLDER
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
    said = promtool("check", "config", tmp_path / name)
    assert "SUCCESS: 1 rule files found" in said
    assert "SUCCESS: 5 rules found" in said


def test_both_configurations_have_the_same_jobs() -> None:
    first, second = (
        yaml.safe_load((FOLDER / f"prometheus{name}.yml").read_text())
        for name in ("", "-kubernetes")
    )
    assert [one["job_name"] for one in first["scrape_configs"]] == [
        one["job_name"] for one in second["scrape_configs"]
    ]
    assert {**first, "scrape_configs": None} == {**second, "scrape_configs": None}


@needs_prometheus
def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", "alerts_test.yml")


def alerts() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0][
        "rules"
    ]
    return rules


def alert(name: str) -> str:
    """The expression of an alert."""
    (found,) = (rule["expr"] for rule in alerts() if rule["alert"] == name)
    return str(found)


def test_alerts_link_to_sections_of_the_runbook() -> None:
    """At one placeholder, which users replace by the address of their copy."""
    sections = anchors((ROOT / "infra" / "README.md").read_text())
    page = "https://git.example/coldpress/blob/main/infra/README.md#"
    assert {rule["annotations"]["runbook_url"] for rule in alerts()} <= {
        page + section for section in sections
    }


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries(**variables: str) -> dict[str, list[str]]:
    """The queries of each panel, with Grafana's variables replaced."""
    values = {
        "__rate_interval": "5m",
        "__range": "6h",
        "campaign": ".*",
        "instance": ".*",
    } | variables
    return {
        panel["title"]: [
            re.sub(r"\$(\w+)", lambda found: values[found[1]], target["expr"])
            for target in panel["targets"]
        ]
        for panel in panels()
    }


def driver_metrics() -> dict[str, set[str]]:
    """The metrics of a driver, each with its labels."""
    metrics = CampaignMetrics(Display(), "c")
    metrics.observe(lambda: LiveFigures(nodes={PORTABLE: 1}))
    for kind in ("built", "judged"):
        metrics.show(Event(kind=kind, what="m portable", seconds=1.0))
    metrics.show(Event(kind="outcome", what="m portable", outcome=FAILED))
    return {
        sample.name: set(sample.labels)
        for family in metrics.registry.collect()
        for sample in family.samples
    }


@needs_prometheus
def test_queries_parse_and_name_existing_metrics(tmp_path: Path) -> None:
    every = [query for found in queries().values() for query in found]
    rules = [{"record": f"query:{index}", "expr": query} for index, query in enumerate(every)]
    (tmp_path / "rules.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]})
    )
    assert f"SUCCESS: {len(every)} rules found" in promtool(
        "check", "rules", tmp_path / "rules.yml"
    )
    known = driver_metrics() | SERVING
    for query in (*every, *(rule["expr"] for rule in alerts())):
        named = set(re.findall(r"coldpress_\w+", query))
        assert named <= known.keys(), query
        labels = TARGET.union(*(known[name] for name in named))
        grouped = {
            label
            for found in re.findall(r"(?:by|on) \(([\w, ]+)\)", query)
            for label in found.split(", ")
        }
        matched = set(re.findall(r'(\w+)=~?"', query))
        assert grouped | matched <= labels, query
    for variable in dashboard()["templating"]["list"][1:]:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
        assert label in known[name] | TARGET


def test_serving_has_the_metrics_of_its_panels() -> None:
    metrics = ServingMetrics(lambda: 0.0)
    metrics.artifact.info(dict.fromkeys(SERVING["coldpress_serving_artifact_info"], "x"))
    found = {
        sample.name: set(sample.labels)
        for family in metrics.registry.collect()
        for sample in family.samples
    }
    assert SERVING.items() <= found.items()


@pytest.mark.filterwarnings("ignore:Prefer using dashboardv2:DeprecationWarning")
def test_dashboard_fields_are_those_of_grafana() -> None:
    """Grafana's SDK keeps the fields that it knows, of panels, their options and their queries,
    too.
    """
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    assert contains(json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard()))), dashboard())


def contains(whole: object, part: object) -> bool:
    """Whether JSON has all fields and values of another, which may lack defaults."""
    if isinstance(whole, dict) and isinstance(part, dict):
        return all(name in whole and contains(whole[name], value) for name, value in part.items())
    if isinstance(whole, list) and isinstance(part, list):
        return len(whole) == len(part) and all(
            contains(*pair) for pair in zip(whole, part, strict=True)
        )
    return whole == part


def test_dashboard_panels_and_variables_are_sound() -> None:
    """Ids are unique, panels stay in the grid and do not overlap, and every query is of the chosen
    Prometheus.
    """
    found = dashboard()
    ids = [panel["id"] for panel in found["panels"]]
    assert len(ids) == len(set(ids))
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in found["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    first, *others = found["templating"]["list"]
    assert (first["type"], first["query"]) == ("datasource", "prometheus")
    chosen = {"type": "prometheus", "uid": f"${{{first['name']}}}"}
    targets = [target for panel in panels() for target in panel["targets"]]
    assert [one["datasource"] for one in (*others, *panels(), *targets)] == [chosen] * (
        len(others) + len(panels()) + len(targets)
    )
    used = set(re.findall(r"\$(\w+)", json.dumps(targets))) - {"__rate_interval", "__range"}
    assert used == {variable["name"] for variable in others}


class Prometheus:
    """A server that scrapes one target by the repository's configuration, twice a second.

    Args:
        folder: for its data.
        job: of the target.
        port: of the target.
    """

    def __init__(self, folder: Path, job: str, port: int) -> None:
        self.address, self.folder = f"{LOOPBACK}:{free_port()}", folder
        configuration = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
        configuration["global"] = {
            "scrape_interval": "500ms",
            "scrape_timeout": "500ms",
            "evaluation_interval": "1s",
        }
        (scrape,) = (
            scrape for scrape in configuration["scrape_configs"] if scrape["job_name"] == job
        )
        configuration["scrape_configs"] = [
            scrape | {"static_configs": [{"targets": [f"{LOOPBACK}:{port}"]}]}
        ]
        folder.mkdir()
        shutil.copy(FOLDER / "alerts.yml", folder)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))

    @contextmanager
    def running(self) -> Iterator[None]:
        command = [
            "prometheus",
            "--config.file=prometheus.yml",
            f"--web.listen-address={self.address}",
            "--storage.tsdb.path=data",
        ]
        with (
            (self.folder / "log").open("w") as log,
            subprocess.Popen(command, cwd=self.folder, stderr=log, stdout=log) as process,
        ):
            try:
                wait_until(self._is_ready, "Prometheus is ready")
                yield
            finally:
                process.terminate()

    def _is_ready(self) -> bool:
        try:
            return requests.get(f"http://{self.address}/-/ready", timeout=5).ok
        except requests.ConnectionError:
            return False

    def query(self, query: str, at: float | None = None) -> list[dict[str, Any]]:
        parameters: dict[str, str | float] = {"query": query} | ({} if at is None else {"time": at})
        answer = requests.get(
            f"http://{self.address}/api/v1/query", params=parameters, timeout=30
        ).json()
        assert answer["status"] == "success", answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def numbers(self, query: str, label: str) -> dict[str, float]:
        return {
            one["metric"][label]: float(one["value"][1])
            for one in self.query(query)
            if float(one["value"][1])
        }

    def check_panels(self, at: float, *, of_serving: bool, **variables: str) -> None:
        """Every query of every panel of campaigns, or of serving, has numbers."""
        for title, found in queries(**variables).items():
            for query in found:
                if ("coldpress_serving_" in query) == of_serving:
                    values = [float(one["value"][1]) for one in self.query(query, at)]
                    assert values, f"{title}: {query}"
                    assert all(map(math.isfinite, values)), f"{title}: {query}: {values}"


def optimized(folder: Path, port: int) -> tuple[list[Scrape], float]:
    """Run a campaign of a good and three bad models; return its metrics several times a second, and
    when they ended.
    """
    write_catalog(folder, CATALOG.format())
    paths = ["--store", str(folder / "store"), "--tracking-uri", f"sqlite:///{folder}/mlflow.db"]
    command = [
        sys.executable,
        "-m",
        "jobs.optimize",
        str(folder / "catalog.yaml"),
        *paths,
        "--accept-noise",
    ]
    scrapes: list[Scrape] = []
    last = 0.0
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--metrics", f"{LOOPBACK}:{port}"],
            env=environment(folder),
            cwd=folder,
            stdout=log,
            stderr=log,
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
    prometheus = Prometheus(tmp_path / "prometheus", "coldpress-driver", port)
    with prometheus.running():
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
    prometheus = Prometheus(tmp_path / "prometheus", "coldpress-serving", port)
    not_ready = alert("ColdpressServingNotReady")
    with (
        prometheus.running(),
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
            publish(store, wrong_artifact(scripted, tmp_path / "wrong"))
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
