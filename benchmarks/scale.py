"""Measure the cost of a campaign beside its builds and judges, and how it grows with the catalog.

python -m benchmarks.scale [--only plan] [--idle 10000] [--real 1000] [--out
benchmarks/results/scale-DATE.md]

plan  plan catalogs of 100 to 100,000 TorchScript files, with nothing done before, and again; no
      cluster
idle  a campaign on two nodes whose tasks do nothing, so that only the driver's own cost
      remains: its time for each item, its memory, the tasks in flight; and the finished
      campaign again
real  the same with real builds and judges of small TorchScript models, once. Both nodes are on
      this machine, so the other node's work disturbs most judges of the machine's level, and
      these are unstable
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import children
from benchmarks.pages import machine, markdown_table, today
from benchmarks.scale_jobs import CLASSES
from freezer.hardware import available_cpus, detect
from tests.support.raylets import RayCluster

PLAN_SIZES = (100, 1_000, 10_000, 100_000)
IDLE_SIZES = (100, 1_000)
"""Numbers of items of further idle campaigns, to see how the cost grows."""

BUILDS = 24
"""Builds of each worker or shell for the efficiency."""


def plan_table(sizes: Sequence[int], folder: Path) -> list[str]:
    """The time to plan catalogs of some sizes."""
    rows = []
    for size in sizes:
        own = folder / f"plan-{size}"
        write_catalog(own, size)
        first, again = (_child({"do": "plan", "folder": str(own)}) for _ in range(2))
        times = (f"{first['wall_s']:.1f}", f"{again['wall_s']:.1f}", f"{again['cpu_s']:.1f}")
        rows.append((f"{size:,}", f"{first['items']:,}", *times, f"{first['peak_mb']:.0f}"))
    head = (
        "entries",
        "items",
        "first, s",
        "again, s",
        "of which CPU, s",
        "peak memory of the process, MB",
    )
    return ["## Planning", "", *markdown_table(head, rows)]


def campaign_table(title: str, sizes: Sequence[int], folder: Path, *, idle: bool) -> list[str]:
    """The driver's cost of campaigns of some numbers of items."""
    rows = []
    for size in sizes:
        own = folder / f"{'idle' if idle else 'real'}-{size}"
        write_catalog(own, size // CLASSES)
        if idle:
            _child({"do": "template", "folder": str(own)})
        with cluster_of_nodes(2) as address:
            job = {
                "do": "drive",
                "folder": str(own),
                "address": address,
                "do_build": not idle,
                "do_judge": not idle,
            }
            first = _child(job)
            again = _child(job) if idle else None
        if again is not None and again["verdicts"] != {
            f"unchanged {name}": count for name, count in first["verdicts"].items()
        }:
            raise RuntimeError(
                f"the finished campaign repeated something: {first['verdicts']}, then"
                f" {again['verdicts']}"
            )
        each_ms = (
            1e3 * first[name] / first["items"] for name in ("wall_s", "cpu_s", "tracker_cpu_s")
        )
        rows.append(
            (
                *(
                    f"{first['items']:,}",
                    f"{first['wall_s']:.0f}",
                    *(f"{value:.1f}" for value in each_ms),
                ),
                *(f"{first['peak_mb']:.0f}", f"{first['in_flight']}"),
                ", ".join(f"{count:,} {name}" for name, count in first["verdicts"].items()),
                *(
                    (f"{again['wall_s']:.1f}", f"{again['cpu_s']:.1f}")
                    if again is not None
                    else ("", "")
                ),
            )
        )
    head = (
        *(
            "items",
            "wall, s",
            "wall for each item, ms",
            "CPU time for each item: driver, ms",
            "process that writes to MLflow, ms",
        ),
        *(
            "driver's peak memory, MB",
            "most tasks in flight",
            "verdicts",
            "again, s",
            "driver's CPU time then, s",
        ),
    )
    return [f"## {title}", "", *markdown_table(head, rows)]


def efficiency_table(folder: Path) -> list[str]:
    """The builds per second of one and two workers, and of one and two shells."""
    rates: dict[tuple[str, int], float] = {}
    for kind, measure in (("shells", _shells), ("workers", _workers)):
        for count in (1, 2):
            own = folder / f"{kind}-{count}"
            write_catalog(own, BUILDS * count // CLASSES)
            rates[kind, count] = measure(own, count)
    gains = {kind: rates[kind, 2] / rates[kind, 1] for kind in ("shells", "workers")}
    rows = [
        (kind, f"{rates[kind, 1]:.2f}", f"{rates[kind, 2]:.2f}", f"{gain:.2f}")
        for kind, gain in gains.items()
    ]
    reached, gained = rates["workers", 2] / rates["shells", 2], gains["workers"] / gains["shells"]
    return [
        *(
            "## Parallel efficiency of builds",
            "",
            *markdown_table(("", "one, builds/s", "two, builds/s", "gain"), rows),
        ),
        *(
            "",
            (
                f"Two workers reach {reached:.0%} of the rate of two shells, and {gained:.0%} of"
                " their gain."
            ),
        ),
    ]


def _shells(folder: Path, count: int) -> float:
    """Builds per second of `count` processes that build a share each."""
    jobs = [
        {"do": "builds", "folder": str(folder), "share": [index, count]} for index in range(count)
    ]
    found = [
        children.finish(child) for child in [children.start("scale_jobs", job) for job in jobs]
    ]
    wall_s = max(result["ended"] for result in found) - min(result["started"] for result in found)
    return float(sum(result["builds"] for result in found) / wall_s)


def _workers(folder: Path, count: int) -> float:
    """Builds per second of a campaign on `count` workers, from the first start to the last end;
    judges run later.
    """
    _child({"do": "template", "folder": str(folder)})
    with cluster_of_nodes(1, num_cpus=count) as address:
        job = {
            "do": "drive",
            "folder": str(folder),
            "address": address,
            "do_build": True,
            "do_judge": False,
        }
        found = _child(job)
    return float(found["builds"] / found["build_phase_s"])


def write_catalog(folder: Path, num_entries: int) -> None:
    """Write a catalog of small TorchScript models, each in a file of its own, as JSON Lines."""
    models = folder / "models"
    models.mkdir(parents=True)
    _child({"do": "model", "path": str(folder / "model.pt")})
    content = (folder / "model.pt").read_bytes()
    with (folder / "catalog.jsonl").open("w") as file:
        for index in range(num_entries):
            path = models / f"model-{index:06d}.pt"
            comment = f"{index:06d}".encode()  # of the ZIP file, so that no two models share a key
            path.write_bytes(content[:-2] + len(comment).to_bytes(2, "little") + comment)
            entry = {
                "name": f"model-{index:06d}",
                "source": f"torchscript:models/{path.name}",
                "inputs": {"input": {"shape": [4, 32], "dtype": "float32"}},
                "recipes": ["torchscript-frozen"],
            }
            file.write(json.dumps(entry) + "\n")


@contextlib.contextmanager
def cluster_of_nodes(count: int, *, num_cpus: int | None = None) -> Iterator[str]:
    """The address of a new Ray cluster on this machine; its nodes share the CPUs."""
    classes, each = detect().classes, num_cpus or max(1, available_cpus() // count)
    with (
        tempfile.TemporaryDirectory(prefix="coldpress-home-") as home,
        RayCluster(Path(home)) as cluster,
    ):
        for _ in range(count):
            cluster.start(num_cpus=each, classes=classes)
        yield cluster.address


def _child(job: Mapping[str, Any]) -> dict[str, Any]:
    return children.finish(children.start("scale_jobs", job))


def main() -> None:
    """Measure, and print the tables; with --out, write them as well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["plan", "idle", "real", "efficiency"], action="append")
    parser.add_argument(
        "--idle", type=int, default=10_000, help="number of items of the largest idle campaign"
    )
    parser.add_argument(
        "--real", type=int, default=1_000, help="number of items of the real campaign"
    )
    parser.add_argument(
        "--plan",
        type=int,
        default=PLAN_SIZES[-1],
        help="number of entries of the largest catalog to plan",
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    chosen = given.only or ["plan", "idle", "real", "efficiency"]
    command = shlex.join(["python", "-m", "benchmarks.scale", *sys.argv[1:]])
    lines = [f"# Scale, {today()}", "", f"`{command}`", "", *machine()]
    with tempfile.TemporaryDirectory(prefix="coldpress-scale-") as scratch:
        folder, began = Path(scratch), time.monotonic()
        if "plan" in chosen:
            lines += [
                "",
                *plan_table(
                    [size for size in PLAN_SIZES if size < given.plan] + [given.plan], folder
                ),
            ]
        if "idle" in chosen:
            sizes = [*(size for size in IDLE_SIZES if size < given.idle), given.idle]
            lines += [
                "",
                *campaign_table("Campaigns of tasks that do nothing", sizes, folder, idle=True),
            ]
        if "real" in chosen:
            lines += [
                "",
                *campaign_table(
                    "Campaigns of real builds and judges", [given.real], folder, idle=False
                ),
            ]
        if "efficiency" in chosen:
            lines += ["", *efficiency_table(folder)]
        print(f"measured in {time.monotonic() - began:.0f} s", file=sys.stderr)
    text = "\n".join(lines) + "\n"
    if given.out:
        given.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
