"""A quick campaign that records its tasks: `python watched.py CATALOG STORE TRACKING_URI CAMPAIGN
[OPTION=VALUE ...]`.

Every probe, build and judge leaves a file in STORE-intervals. The report is STORE.json. OPTION is
`wait_s` or `device_classes` of pipeline.config.Config."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import pipeline.scheduling.executor
import pipeline.scheduling.node_check
import pipeline.worker.build_task
import pipeline.worker.judge_task
from freezer.cli import exiting
from freezer.errors import INFRASTRUCTURE
from pipeline.config import Config
from pipeline.reporting import LineDisplay
from pipeline.run import run
from tests.support.drive import POLICY


@dataclass(frozen=True, kw_only=True)
class Interval:
    """When and where a task ran; times are seconds since the epoch."""

    kind: str
    what: str
    node_id: str
    start: float
    end: float

    def overlaps(self, other: Interval) -> bool:
        """Whether both ran on one node at the same time."""
        return self.node_id == other.node_id and self.start < other.end and other.start < self.end


def watcher(kind: str, task: Callable[..., Any], store: str) -> Callable[..., Any]:
    """A task that records its interval.

    Ray pickles it by value, because it belongs to `__main__`.
    """

    def watched(*request: Any) -> Any:
        import ray

        start = time.time()
        try:
            return task(*request)
        finally:
            folder = Path(f"{store}-intervals")  # not in the store, whose disk may be full
            folder.mkdir(exist_ok=True)
            what = f"{request[0].entry.name} {request[0].device_class}" if kind != "probe" else ""
            node_id = ray.get_runtime_context().get_node_id()
            interval = Interval(kind=kind, what=what, node_id=node_id, start=start, end=time.time())
            partial = folder / f"{uuid.uuid4().hex}.partial"
            partial.write_text(json.dumps(asdict(interval)))
            partial.rename(partial.with_suffix(".json"))

    return watched


def intervals(*stores: Path) -> list[Interval]:
    """The intervals of all tasks of some campaigns."""
    return [
        Interval(**json.loads(path.read_text()))
        for store in stores
        for path in Path(f"{store}-intervals").glob("*.json")
    ]


def main(catalog: str, store: str, tracking_uri: str, campaign: str, *options: str) -> int:
    """Run the campaign and return its exit code."""
    given = dict(option.split("=", 1) for option in options)
    pipeline.scheduling.executor.build = watcher("build", pipeline.worker.build_task.build, store)  # type: ignore[attr-defined]
    pipeline.scheduling.executor.judge = watcher("judge", pipeline.worker.judge_task.judge, store)  # type: ignore[attr-defined]
    pipeline.scheduling.node_check.inspect = watcher(
        "probe", pipeline.scheduling.node_check.inspect, store
    )
    config = Config(
        catalog=catalog,
        store=store,
        tracking_uri=tracking_uri,
        campaign=campaign,
        policy=POLICY,
        wait_s=float(given["wait_s"]) if "wait_s" in given else None,
        device_classes=tuple(given["device_classes"].split(","))
        if "device_classes" in given
        else (),
    )
    console = Console(width=200)
    with exiting(refused=INFRASTRUCTURE):
        report = run(config, LineDisplay(console, verbose=True))
    print(*report.infrastructure, sep="\n", flush=True)
    report.write_json(Path(f"{store}.json"))
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
