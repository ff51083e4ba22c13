"""Measure what a campaign costs beside its builds and judges, and how that grows with the catalog.

    python -m benchmarks.scale [--only plan] [--idle 10000] [--real 1000] [--out benchmarks/results/scale-DATE.md]

    plan         catalogs of 100 to 100,000 TorchScript files: planned with nothing done before, and again. No cluster
    idle         a campaign on a cluster of two nodes whose tasks do nothing, so that what is left is the driver: its time for each
                 item, its memory, the tasks in flight; and the finished campaign again
    real         the same with real builds and judges of small TorchScript models, once. Both nodes are on this machine, so most
                 judges of the machine's level are disturbed by the other node's work, and unstable
    efficiency   builds with two workers against one, and two shells against one

An item is a model for a device class; an entry of these catalogs has two, the machine's level and portable. What the processes do
is in scale_jobs.py.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import where
from benchmarks.scale_jobs import JOBS, RESULT
from freezer.hardware.machine import available_threads, detect
from tests.raylets import RayCluster

ROOT = Path(__file__).resolve().parent.parent
CHILD_TIMEOUT_S = 6 * 3600.0
PLAN_SIZES = (100, 1_000, 10_000, 100_000)
IDLE_SIZES = (100, 1_000)
"""Numbers of items that an idle campaign has besides the one asked for, to see how it grows."""

BUILDS = 24
"""Of each worker or shell, where their efficiency is measured."""

CLASSES = ("the machine's level", "portable")
"""Of each entry."""

NODES = 2


def plan_table(sizes: Sequence[int], folder: Path) -> list[str]:
    """How long catalogs of some sizes take to plan."""
    lines = [
        "## Planning",
        "",
        "| entries | items | first, s | again, s | of which CPU, s | peak memory of the process, MB |",
        "|---|---|---|---|---|---|",
    ]
    for size in sizes:
        own = folder / f"plan-{size}"
        write_catalog(own, size)
        first = _child({"do": "plan", "folder": str(own)})
        again = _child({"do": "plan", "folder": str(own)})
        lines.append(
            f"| {size:,} | {first['items']:,} | {first['wall_s']:.1f} | {again['wall_s']:.1f} | {again['cpu_s']:.1f} | "
            f"{first['peak_mb']:.0f} |"
        )
    return lines


def campaign_table(title: str, sizes: Sequence[int], folder: Path, *, idle: bool) -> list[str]:
    """What campaigns of some numbers of items cost their driver."""
    head = (
        *("items", "wall, s", "wall for each item, ms", "CPU time for each item: driver, ms", "process that writes to MLflow, ms"),
        *("driver's peak memory, MB", "most tasks in flight", "verdicts", "again, s", "driver's CPU time then, s"),
    )
    lines = [f"## {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for size in sizes:
        own = folder / f"{'idle' if idle else 'real'}-{size}"
        write_catalog(own, size // len(CLASSES))
        if idle:
            _child({"do": "template", "folder": str(own)})
        with cluster_of_nodes(NODES) as address:
            job = {"do": "drive", "folder": str(own), "address": address, "do_build": not idle, "do_judge": not idle}
            first = _child(job)
            again = _child(job) if idle else None
        if again is not None and again["verdicts"] != {f"unchanged {name}": count for name, count in first["verdicts"].items()}:
            raise RuntimeError(f"the finished campaign did something again: {first['verdicts']}, then {again['verdicts']}")
        verdicts = ", ".join(f"{count:,} {name}" for name, count in first["verdicts"].items())
        lines.append(
            f"| {first['items']:,} | {first['wall_s']:.0f} | {1e3 * first['wall_s'] / first['items']:.0f} | "
            f"{1e3 * first['cpu_s'] / first['items']:.1f} | {1e3 * first['tracker_cpu_s'] / first['items']:.1f} | "
            f"{first['peak_mb']:.0f} | {first['in_flight']} | {verdicts} | "
            + (f"{again['wall_s']:.1f} | {again['cpu_s']:.1f} |" if again is not None else "| |")
        )
    return lines


def efficiency_table(folder: Path) -> list[str]:
    """How far two workers get against one, beside two shells against one."""
    rates: dict[tuple[str, int], float] = {}
    for kind in ("shells", "workers"):
        for count in (1, 2):
            own = folder / f"{kind}-{count}"
            write_catalog(own, BUILDS * count // len(CLASSES))
            rates[kind, count] = _shells(own, count) if kind == "shells" else _workers(own, count)
    gains = {kind: rates[kind, 2] / rates[kind, 1] for kind in ("shells", "workers")}
    lines = ["## Parallel efficiency of builds", "", "| | one, builds/s | two, builds/s | gain |", "|---|---|---|---|"]
    for kind in ("shells", "workers"):
        lines.append(f"| {kind} | {rates[kind, 1]:.2f} | {rates[kind, 2]:.2f} | {gains[kind]:.2f} |")
    reached, gained = rates["workers", 2] / rates["shells", 2], gains["workers"] / gains["shells"]
    lines += [
        "",
        f"Two workers reach {reached:.0%} of what two shells reach, and gain {gained:.0%} of what these gain by being two.",
    ]
    return lines


def _shells(folder: Path, count: int) -> float:
    """Builds a second of `count` processes, each of which builds its share."""
    children = [_start({"do": "builds", "folder": str(folder), "share": [index, count]}) for index in range(count)]
    found = [_finish(child) for child in children]
    wall_s = max(result["ended"] for result in found) - min(result["started"] for result in found)
    return float(sum(result["builds"] for result in found) / wall_s)


def _workers(folder: Path, count: int) -> float:
    """Builds a second of a campaign on as many workers, from the first that starts to the last that ends; judged after that."""
    _child({"do": "template", "folder": str(folder)})
    with cluster_of_nodes(1, num_cpus=count) as address:
        job = {"do": "drive", "folder": str(folder), "address": address, "do_build": True, "do_judge": False, "judge_batch": 10**6}
        found = _child(job)
    return float(found["builds"] / found["build_phase_s"])


def write_catalog(folder: Path, num_entries: int) -> None:
    """A catalog of small TorchScript models, each a file of its own, in JSON Lines."""
    models = folder / "models"
    models.mkdir(parents=True)
    _child({"do": "model", "path": str(folder / "model.pt")})
    content = (folder / "model.pt").read_bytes()
    with (folder / "catalog.jsonl").open("w") as file:
        for index in range(num_entries):
            path = models / f"model-{index:06d}.pt"
            comment = f"{index:06d}".encode()  # of the ZIP file: no two models share a key
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
    """The address of a new Ray cluster on this machine, whose CPUs its nodes share."""
    classes, each = detect().classes, num_cpus or max(1, available_threads() // count)
    with tempfile.TemporaryDirectory(prefix="coldpress-home-") as home, RayCluster(Path(home)) as cluster:
        for _ in range(count):
            cluster.start(num_cpus=each, classes=classes)
        yield cluster.address


def _child(job: Mapping[str, Any]) -> dict[str, Any]:
    return _finish(_start(job))


def _start(job: Mapping[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.scale", "--job", json.dumps(job)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(child: subprocess.Popen[str]) -> dict[str, Any]:
    """The result of a job.

    Raises:
        RuntimeError: it ended without one.
    """
    said, _ = child.communicate(timeout=CHILD_TIMEOUT_S)
    for line in said.splitlines():
        if line.startswith(RESULT):
            return dict(json.loads(line.removeprefix(RESULT)))
    raise RuntimeError(f"{shlex.join(map(str, child.args))} left with {child.returncode}:\n{said[-3000:]}")  # type: ignore[arg-type]


def main() -> None:
    """Measure, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["plan", "idle", "real", "efficiency"], action="append")
    parser.add_argument("--idle", type=int, default=10_000, help="items of the largest idle campaign")
    parser.add_argument("--real", type=int, default=1_000, help="items of the real campaign")
    parser.add_argument("--plan", type=int, default=PLAN_SIZES[-1], help="entries of the largest catalog")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        print(f"{RESULT}{json.dumps(JOBS[given.job['do']](given.job))}", flush=True)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    chosen = given.only or ["plan", "idle", "real", "efficiency"]
    command = shlex.join(["python", "-m", "benchmarks.scale", *(word for word in sys.argv[1:])])
    lines = [f"# Scale, {datetime.datetime.now().astimezone().date().isoformat()}", "", f"`{command}`", "", *where()]
    with tempfile.TemporaryDirectory(prefix="coldpress-scale-") as scratch:
        folder, began = Path(scratch), time.monotonic()
        if "plan" in chosen:
            lines += ["", *plan_table([size for size in PLAN_SIZES if size < given.plan] + [given.plan], folder)]
        if "idle" in chosen:
            sizes = [*(size for size in IDLE_SIZES if size < given.idle), given.idle]
            lines += ["", *campaign_table("Campaigns of tasks that do nothing", sizes, folder, idle=True)]
        if "real" in chosen:
            lines += ["", *campaign_table("Campaigns of real builds and judges", [given.real], folder, idle=False)]
        if "efficiency" in chosen:
            lines += ["", *efficiency_table(folder)]
        print(f"measured in {time.monotonic() - began:.0f} s", file=sys.stderr)
    text = "\n".join(lines) + "\n"
    if given.out:
        given.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
