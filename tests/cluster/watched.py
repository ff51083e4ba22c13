"""`python tests/cluster/watched.py CATALOG STORE TRACKING_URI CAMPAIGN [OPTION=VALUE ...]`: a quick campaign, tasks watched.

Every task that runs on a node (probe, build, judge) leaves a file in STORE-intervals: node, start, end, what it was. The report is
STORE.json. OPTION is a name of pipeline.config.Config, or `gone_s`, which takes the place of `pipeline.scheduling.fleet.GONE_S`.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import pipeline.scheduling.executor
import pipeline.scheduling.fleet
import pipeline.scheduling.node_check
import pipeline.worker.probe
import pipeline.worker.tasks
from freezer.limits import SamplingPolicy
from jobs.exits import exiting
from pipeline.config import Config
from pipeline.reporting.display import LineDisplay
from pipeline.run import run

POLICY = SamplingPolicy(time_limit_s=0.5, warmup_s=0.2, min_rounds=2, busy_limit=2.0, steal_limit=2.0)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """When a task ran, in seconds since the epoch, and where."""

    kind: str
    what: str
    campaign: str
    node_id: str
    start: float
    end: float

    def overlaps(self, other: Interval) -> bool:
        """Whether both ran on one node at one time."""
        return self.node_id == other.node_id and self.start < other.end and other.start < self.end


def watcher(kind: str, task: Callable[..., Any], store: str) -> Callable[..., Any]:
    """A task that leaves its interval in the store. It travels by value, being of `__main__`."""

    def watched(*request: Any) -> Any:
        import ray

        start = time.time()
        try:
            return task(*request)
        finally:
            folder = Path(f"{store}-intervals")  # beside it: the store's disk may be full
            folder.mkdir(exist_ok=True)
            found = {
                "kind": kind,
                "what": f"{request[0].entry.name} {request[0].device_class}" if kind != "probe" else "",
                "campaign": Path(store).name,
                "node_id": ray.get_runtime_context().get_node_id(),
                "start": start,
                "end": time.time(),
            }
            partial = folder / f"{uuid.uuid4().hex}.partial"
            partial.write_text(json.dumps(found))
            partial.rename(partial.with_suffix(".json"))

    return watched


def intervals(*stores: Path) -> list[Interval]:
    """Of all tasks that campaigns ran, in their order."""
    found = [Interval(**json.loads(path.read_text())) for store in stores for path in Path(f"{store}-intervals").glob("*.json")]
    return sorted(found, key=lambda interval: interval.start)


def burn(seconds: float, until: str) -> None:
    """Do to a core what a neighbour's build does, until a file appears at the latest."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not Path(until).exists():
        sum(range(100_000))


def main(catalog: str, store: str, tracking_uri: str, campaign: str, *options: str) -> int:
    """Run the campaign; the exit code."""
    given = dict(option.split("=", 1) for option in options)
    pipeline.scheduling.fleet.GONE_S = float(given.pop("gone_s", pipeline.scheduling.fleet.GONE_S))
    pipeline.scheduling.executor.build = watcher("build", pipeline.worker.tasks.build, store)  # type: ignore[attr-defined]
    pipeline.scheduling.executor.judge = watcher("judge", pipeline.worker.tasks.judge, store)  # type: ignore[attr-defined]
    pipeline.scheduling.node_check.probe = watcher("probe", pipeline.worker.probe.probe, store)  # type: ignore[attr-defined]
    typed: dict[str, Any] = {
        name: float(value) if name == "wait_s" else tuple(value.split(",")) if name in {"device_classes", "recipes"} else value
        for name, value in given.items()
    }
    config = Config(catalog=catalog, store=store, tracking_uri=tracking_uri, campaign=campaign, policy=POLICY, **typed)
    console = Console(width=200)
    with exiting(console):
        report = run(config, LineDisplay(console))
    for line in report.infrastructure:
        print(line, flush=True)
    report.write_json(Path(f"{store}.json"))
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
