"""Measure the three cliffs of packed weights (instruction set, thread count, shape), and check that
the loader avoids them.

    python -m benchmarks.cliffs [--repeats 3] [--only threads] [--out
    benchmarks/results/cliffs-2026-11-22.md]

A payload is fast only where it was built for; this measures how much slower it is elsewhere. Every
build and measurement runs in a process of its own that starts with the limits of a class in its
environment, because oneDNN reads them once. The cells open payloads directly; the loader would
refuse most of them. Below each table `freezer.load` chooses from a store with all these payloads,
and its choice is compared with the best cell. Each repeat runs in a new random order. The jobs are
in cliff_jobs.py.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks import children
from benchmarks.cliff_jobs import BATCH_MAX
from benchmarks.pages import machine, markdown_table, today
from freezer.artifact import Artifact
from freezer.errors import UsageError
from freezer.hardware import DEVICE_CLASSES, available_cpus, best_level, detect
from freezer.store import Store

V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"
LIMIT_VARIABLES = {name for known in DEVICE_CLASSES.values() for name in known.limits} | {
    "DNNL_MAX_CPU_ISA",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
}
"""Removed from the environment of the jobs, so that only the limits of a cell apply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """One artifact: payloads for batch 1 with each thread count, and with `dynamic` also for
    batches up to BATCH_MAX.
    """

    model: str
    device_class: str
    counts: tuple[int, ...]
    dynamic: bool

    def __str__(self) -> str:
        return f"{self.model}_{self.device_class}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process that runs a model of a build at batch 1: its limits, its threads, and which
    payload it opens.

    Attributes:
        payload: the thread count and shape of the payload; None lets the loader choose.
    """

    build: Build
    limits_of: str
    num_threads: int
    payload: tuple[int, Literal["static", "dynamic"]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of cells, and the loader's choices below it.

    Attributes:
        rows: the cells of each row.
        served: by name, the process in which the loader chooses, and the cells with the same limits
            and threads.
        missing: why there are no rows, if the machine cannot fill them.
    """

    title: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[Process]]
    served: Mapping[str, tuple[Process, Sequence[Process]]]
    missing: str | None = None

    @property
    def processes(self) -> list[Process]:
        """Everything to measure for it."""
        if self.missing:
            return []
        return [cell for row in self.rows.values() for cell in row] + [
            process for process, _ in self.served.values()
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """The results of the repeats of one process.

    Attributes:
        medians_ms: without those that other processes disturbed.
        taken: the payloads that the loader chose; empty for a cell.
    """

    medians_ms: Sequence[float]
    num_disturbed: int
    max_abs_err: float
    taken: Sequence[str]

    def __str__(self) -> str:
        error = f"error {self.max_abs_err:.1e}"
        if not self.medians_ms:
            return f"disturbed; {error}"
        disturbed = f"; {self.num_disturbed} disturbed" if self.num_disturbed else ""
        middle, low, high = (
            statistics.median(self.medians_ms),
            min(self.medians_ms),
            max(self.medians_ms),
        )
        return f"**{_ms(middle)}** ({_ms(low)} to {_ms(high)}{disturbed}); {error}"


def plan() -> list[Table]:
    """The tables of the three cliffs.

    Raises:
        UsageError: this machine has no x86-64 level that packages are built for.
    """
    here = detect({})
    level = best_level(here.classes)
    if level is None:
        raise UsageError(
            "nothing to measure:"
            f" {'; '.join(f'{name}: {why}' for name, why in here.why_not.items())}"
        )
    num_threads = min(2, available_cpus())
    classes = [name for name in (V3, V4) if name in here.classes]

    def builds(model: str, counts: tuple[int, ...]) -> list[Build]:
        return [
            Build(model=model, device_class=name, counts=counts, dynamic=name == level)
            for name in classes
        ]

    resnet18, mobilenet = (
        builds("resnet18", (num_threads,)),
        builds("mobilenet-v2", tuple(range(1, num_threads + 1))),
    )
    no_v4 = (
        None
        if V4 in here.classes
        else f"Not measured: {here.why_not[V4]}, so no payload for {V4} runs here."
    )
    one_cpu = None if num_threads == 2 else "Not measured: this process may use one CPU only."
    return [
        isa_table(resnet18, num_threads, no_v4),
        *(threads_table(build, one_cpu) for build in mobilenet),
        shape_table([found[classes.index(level)] for found in (resnet18, mobilenet)], num_threads),
    ]


def isa_table(builds: Sequence[Build], num_threads: int, missing: str | None) -> Table:
    """Each class's payload under the limits of each class."""
    served = {
        f"under the limits of `{build.device_class}`": Process(
            build=build, limits_of=build.device_class, num_threads=num_threads
        )
        for build in builds
    }
    rows = {
        f"`{build.device_class}`": [_cell(process, build) for process in served.values()]
        for build in builds
    }
    return _grid(
        f"Instruction set: resnet18, {threads_text(num_threads)}",
        "built for",
        rows,
        served,
        missing,
    )


def threads_table(build: Build, missing: str | None) -> Table:
    """Each thread count's payload with each thread count, for a class: its kernels decide whether
    there is a cliff.
    """
    served = {
        f"with {threads_text(num)}": Process(
            build=build, limits_of=build.device_class, num_threads=num
        )
        for num in build.counts
    }
    rows = {
        threads_text(num): [_cell(process, build, num) for process in served.values()]
        for num in build.counts
    }
    return _grid(
        f"Threads: mobilenet-v2, `{build.device_class}`", "built with", rows, served, missing
    )


def _grid(
    title: str,
    corner: str,
    rows: Mapping[str, Sequence[Process]],
    served: Mapping[str, Process],
    missing: str | None,
) -> Table:
    """A table with a column for each process of the loader."""
    columns = zip(served.items(), zip(*rows.values(), strict=True), strict=True)
    return Table(
        title=title,
        columns=[corner, *(f"run {name}" for name in served)],
        rows=rows,
        served={name: (process, column) for (name, process), column in columns},
        missing=missing,
    )


def shape_table(builds: Sequence[Build], num_threads: int) -> Table:
    """The payload for batch 1 and the one for all batches, both at batch 1."""
    served = [
        Process(build=build, limits_of=build.device_class, num_threads=num_threads)
        for build in builds
    ]
    rows = {
        process.build.model: [
            _cell(process, process.build),
            _cell(process, process.build, shape="dynamic"),
        ]
        for process in served
    }
    return Table(
        title=f"Shape: run at batch 1, `{builds[0].device_class}`, {threads_text(num_threads)}",
        columns=["model", "built for batch 1", f"built for batches 1 to {BATCH_MAX}"],
        rows=rows,
        served={
            f"{process.build.model} at batch 1": (process, rows[process.build.model])
            for process in served
        },
    )


def _cell(
    served: Process,
    build: Build,
    built_with: int | None = None,
    shape: Literal["static", "dynamic"] = "static",
) -> Process:
    """The process that opens one payload of a build under the same limits and with the same
    threads.
    """
    payload = (served.num_threads if built_with is None else built_with, shape)
    return Process(
        build=build, limits_of=served.limits_of, num_threads=served.num_threads, payload=payload
    )


def measure(processes: Sequence[Process], folder: Path, repeats: int) -> dict[Process, Figure]:
    """Build all payloads in parallel, then run each process `repeats` times, in a new random order
    each time.
    """
    builds = list(dict.fromkeys(process.build for process in processes))
    with ThreadPoolExecutor(max_workers=available_cpus()) as pool:
        list(pool.map(partial(build_apart, folder=folder), builds))
    store = Store.open(str(folder / "store"), create=True)
    for model in dict.fromkeys(build.model for build in builds):
        artifacts = [
            Artifact.read(folder / str(build) / "artifact")
            for build in builds
            if build.model == model
        ]
        store.publish(model, source_key=model, artifacts=artifacts)
    shuffle = random.Random(0)
    found: dict[Process, list[Mapping[str, Any]]] = defaultdict(list)
    for index in range(repeats):
        started = time.monotonic()
        order = list(processes)
        shuffle.shuffle(order)
        for process in order:
            job = {
                "do": "measure",
                **asdict(process),
                "folder": str(folder / str(process.build)),
                "store": str(store.root),
            }
            found[process].append(_child(job, process.limits_of))
        _say(
            f"repeat {index + 1} of {repeats}: {len(processes)} processes in"
            f" {time.monotonic() - started:.0f} s"
        )
    return {process: _figure(results) for process, results in found.items()}


def build_apart(build: Build, folder: Path) -> None:
    """Build in a process with the limits of the class."""
    own = folder / str(build)
    own.mkdir()
    started = time.monotonic()
    _child({"do": "build", **asdict(build), "folder": str(own)}, build.device_class)
    _say(f"built {build} in {time.monotonic() - started:.0f} s")


def _figure(results: Sequence[Mapping[str, Any]]) -> Figure:
    medians = [result["median_ms"] for result in results if result["median_ms"] is not None]
    return Figure(
        medians_ms=medians,
        num_disturbed=len(results) - len(medians),
        max_abs_err=max(result["max_abs_err"] for result in results),
        taken=tuple(dict.fromkeys(result["taken"] for result in results if result["taken"])),
    )


def _child(job: Mapping[str, Any], limits_of: str) -> dict[str, Any]:
    """The result of a job in a process with only the limits of a class."""
    environ = {name: value for name, value in os.environ.items() if name not in LIMIT_VARIABLES}
    environ |= DEVICE_CLASSES[limits_of].limits
    return children.finish(children.start("cliff_jobs", job, environ))


def render(
    tables: Sequence[Table], figures: Mapping[Process, Figure], repeats: int, command: str
) -> str:
    """The whole page."""
    lines = [
        f"# Cliffs, {today()}",
        *("", f"`{command}`", "", *machine(), ""),
        (
            f"A cell shows the median over {repeats} process{'es' if repeats != 1 else ''} of their"
            " median latency in ms, the smallest"
        ),
        (
            "and the largest of these, and the largest absolute error of any output against the"
            " model in float64."
        ),
        "Batch 1, float32, random weights, recipe `inductor-frozen`.",
    ]
    for table in tables:
        lines += ["", f"## {table.title}", ""]
        if table.missing:
            lines.append(table.missing)
            continue
        lines += markdown_table(
            table.columns,
            [[name, *(str(figures[cell]) for cell in row)] for name, row in table.rows.items()],
        )
        head = ("run", "`freezer.load` takes", "latency", "relative to the best cell")
        rows = []
        for name, (process, cells) in table.served.items():
            figure = figures[process]
            taken = ", ".join(f"`{name}`" for name in figure.taken)
            rows.append(
                (name, taken, str(figure), _against(figure, [figures[cell] for cell in cells]))
            )
        lines += ["", *markdown_table(head, rows)]
    return "\n".join(lines) + "\n"


def _against(served: Figure, cells: Sequence[Figure]) -> str:
    """The loader's latency relative to the best cell's."""
    medians = [statistics.median(cell.medians_ms) for cell in cells if cell.medians_ms]
    if not medians or not served.medians_ms:
        return "disturbed"
    return f"{statistics.median(served.medians_ms) / min(medians):.2f} of {_ms(min(medians))} ms"


def threads_text(num: int) -> str:
    """A thread count in words."""
    return "1 thread" if num == 1 else f"{num} threads"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Print the tables; with --out, write them as well."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cliffs", description="Measure the cliffs of packed weights."
    )
    parser.add_argument("--repeats", type=int, default=3, help="number of processes for each cell")
    parser.add_argument("--out", type=Path, help="also write the tables to this Markdown file")
    parser.add_argument(
        "--only",
        default="",
        help="measure only the tables with this word in their titles: instruction, threads, shape",
    )
    given = parser.parse_args()
    tables = [table for table in plan() if given.only.lower() in table.title.lower()]
    processes = list(dict.fromkeys(process for table in tables for process in table.processes))
    with tempfile.TemporaryDirectory(prefix="cliffs-") as folder:
        figures = measure(processes, Path(folder), given.repeats)
    text = render(
        tables,
        figures,
        given.repeats,
        f"python -m benchmarks.cliffs {shlex.join(sys.argv[1:])}".strip(),
    )
    print(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
