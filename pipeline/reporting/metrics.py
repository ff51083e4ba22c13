"""Prometheus metrics of a running campaign, served over HTTP by its driver.
docs/guides/operate.md#metrics lists them.

Steps and outcomes are counted as their events come. States, nodes and MLflow's backlog are read
when Prometheus asks.
"""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from freezer.errors import UsageError
from pipeline.cluster import host_and_port
from pipeline.records import STYLES, Event, LiveFigures, Outcome
from pipeline.reporting.display import CampaignProgress, Display, Work

BUCKETS_S = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
"""Upper bounds of the histograms of durations, in seconds."""


@contextmanager
def metered(display: Display, campaign: str, address: str | None) -> Iterator[Display]:
    """Serve the metrics of a campaign inside the block; yield the display to run it with.

    Args:
        display: shows the campaign.
        campaign: its name.
        address: `HOST:PORT` to listen on; None serves nothing.

    Raises:
        UsageError: the address is invalid, or in use.
    """
    if address is None:
        yield display
        return
    metrics = CampaignMetrics(display, campaign)
    place = host_and_port(address)
    if place is None:
        raise UsageError(
            f"--metrics {address!r} is not HOST:PORT; for Prometheus on this machine, write"
            " --metrics 127.0.0.1:9105"
        )
    host, port = place
    try:
        server, thread = start_http_server(
            port,
            addr=host,
            registry=metrics.registry,
        )
    except OSError as error:
        raise UsageError(
            f"metrics cannot be served at --metrics {address!r} ({error.strerror}); give another"
            f" HOST:PORT, or end the process that listens there: `ss -ltnp 'sport = :{port}'`"
            " names it"
        ) from error
    try:
        yield metrics
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class CampaignMetrics(Display):
    """A display that passes everything on to another, and counts it. Every metric has the label
    `campaign`.

    Args:
        display: shows the campaign.
        campaign: its name.

    Attributes:
        registry: the metrics.
    """

    def __init__(self, display: Display, campaign: str) -> None:
        self._display, self._campaign = display, campaign
        self._progress = CampaignProgress()
        self._look: Callable[[], LiveFigures] = LiveFigures
        disable_created_metrics()  # they would double the number of series
        self.registry = CollectorRegistry()
        self._outcomes = self._counter("coldpress_outcomes", "Final outcomes.", "verdict", "cached")
        self._failures = self._counter(
            "coldpress_failures", "Failed and rejected outcomes.", "code", "device_class"
        )
        self._unstable = self._counter(
            "coldpress_unstable_judges", "Judges that other processes disturbed."
        )
        self._seconds = {
            "built": self._histogram("coldpress_build_seconds", "Durations of builds."),
            "judged": self._histogram("coldpress_judge_seconds", "Durations of judges."),
        }
        # Here and in `plan`: Prometheus sees an increase from 0, but not a first value.
        self._unstable.labels(campaign)
        for verdict in STYLES:
            self._outcomes.labels(campaign, verdict, "false")
        self.registry.register(self)

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self._display.__exit__(*args)

    def plan(self, num_items: int, work: Work) -> None:
        """Begin a pass: its items replace those of the pass before."""
        self._progress.plan(num_items, work)
        classes = {what.rpartition(" ")[2] for what in work}
        for seconds in self._seconds.values():
            for name in classes:
                seconds.labels(self._campaign, name)
        self._display.plan(num_items, work)

    def observe(self, look: Callable[[], LiveFigures]) -> None:
        """Read nodes and MLflow's backlog from now on."""
        self._look = look

    def show(self, event: Event) -> None:
        """Count an event."""
        self._progress.add(event)
        if event.kind in self._seconds and event.seconds:  # 0: it could not be started
            device_class = event.what.rpartition(" ")[2]
            self._seconds[event.kind].labels(self._campaign, device_class).observe(event.seconds)
        if event.unstable:
            self._unstable.labels(self._campaign).inc()
        if event.outcome is not None:
            self._count(event.outcome)
        self._display.show(event)

    def collect(self) -> Iterator[Metric]:
        """Yield what is read when Prometheus asks; called from other threads."""
        progress = self._progress
        figures = self._look()
        running = list(progress.running.values())
        steps = Counted(item.kind for item in running)
        num_builds = sum(len(item.recipes) for item in running if item.kind == "build")
        states = {
            "waiting": progress.num_waiting,
            "building": steps["build"],
            "judging": steps["judge"],
            "final": progress.num_done,
        }
        states["decided"] = max(0, progress.total - sum(states.values()))
        in_flight = {"build": num_builds, "judge": steps["judge"]}
        yield self._gauges("coldpress_items", "Items of the campaign.", "state", states)
        yield self._gauges(
            "coldpress_steps_in_flight", "Builds of recipes and judges that run.", "step", in_flight
        )
        yield self._gauges(
            "coldpress_nodes", "Nodes that the campaign uses.", "device_class", figures.nodes
        )
        labels = ["campaign"]
        backlog = GaugeMetricFamily(
            "coldpress_mlflow_backlog", "Final outcomes that MLflow lacks.", labels=labels
        )
        logged = CounterMetricFamily(
            "coldpress_mlflow_logged", "Final outcomes that MLflow shows.", labels=labels
        )
        for family, number in ((backlog, figures.num_unlogged), (logged, figures.num_logged)):
            family.add_metric([self._campaign], number)
            yield family

    def _count(self, outcome: Outcome) -> None:
        self._outcomes.labels(self._campaign, outcome.verdict, str(outcome.cached).lower()).inc()
        if outcome.verdict in ("failed", "rejected"):
            code = outcome.code or outcome.failure_kind or ""
            self._failures.labels(self._campaign, code, outcome.device_class).inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(
            name,
            text,
            ("campaign", *labels),
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            name,
            text,
            ("campaign", "device_class"),
            registry=self.registry,
            buckets=BUCKETS_S,
        )

    def _gauges(
        self,
        name: str,
        text: str,
        label: str,
        values: Mapping[str, int],
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=("campaign", label))
        for value, number in values.items():
            family.add_metric([self._campaign, value], number)
        return family
