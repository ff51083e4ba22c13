"""Measure again the three cliffs of packed weights, instruction set, thread count and shape; and that the loader avoids them.

    python -m benchmarks.cliffs [--repeats 3] [--only threads] [--out benchmarks/results/cliffs-2026-11-22.md]

A payload is fast only where it was made for, and this measures how much slower it is elsewhere. Every build and every
measurement is a process of its own whose environment holds a class's limits before Python starts, since oneDNN reads them once.
In the cells payloads are opened raw: the loader would refuse most of them. Below each table `freezer.load` is called on a store
that holds all these payloads, and what it takes is held against the best raw cell there. All of it is measured in a fresh random
order in each repeat. What the processes do is in cliff_jobs.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shlex
import statistics
import subprocess
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

from benchmarks.cliff_jobs import BATCH_MAX, JOBS, best_of, threads_text
from freezer.artifact.folder import Artifact
from freezer.errors import BuildError, JudgeError, UsageError
from freezer.hardware.device_classes import DEVICE_CLASSES, best_level
from freezer.hardware.machine import available_threads, detect
from freezer.store.store import Store

ROOT = Path(__file__).resolve().parent.parent
V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"
CHILD_TIMEOUT_S = 600.0
RESULT = "cliffs-result:"
LIMIT_VARIABLES = {name for known in DEVICE_CLASSES.values() for name in known.limits} | {
    "DNNL_MAX_CPU_ISA",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
}
"""Taken out of the environment of the children, so that only what a cell says holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """One artifact: payloads of each thread count for batch 1, and with `dynamic` for batches up to BATCH_MAX besides."""

    model: str
    device_class: str
    counts: tuple[int, ...]
    dynamic: bool

    def __str__(self) -> str:
        return f"{self.model}_{self.device_class}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One payload, run at batch 1 under the limits of a class and with a number of threads."""

    build: Build
    built_with: int
    shape: Literal["static", "dynamic"] = "static"
    limits_of: str
    num_threads: int

    @property
    def job(self) -> dict[str, Any]:
        """For the child that measures it."""
        return {"do": "measure", **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What the loader takes of a model's artifacts, run at batch 1 under the limits of a class and with a number of threads."""

    build: Build
    limits_of: str
    num_threads: int

    @property
    def job(self) -> dict[str, Any]:
        """For the child that measures it."""
        return {"do": "serve", **asdict(self), "model": self.build.model}


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of cells, row by row; `missing` says why there are none.

    Attributes:
        after: by how the process runs, what the loader serves there, and the raw cells of the same process settings.
    """

    title: str
    corner: str
    columns: Sequence[str] = ()
    rows: Mapping[str, Sequence[Cell]] | None = None
    after: Mapping[str, tuple[Served, Sequence[Cell]]] | None = None
    missing: str | None = None

    @property
    def places(self) -> list[Cell | Served]:
        """All that is measured for it."""
        cells = [cell for row in (self.rows or {}).values() for cell in row]
        return [*cells, *(served for served, _ in (self.after or {}).values())]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """What the processes of one cell measured; `medians_ms` lacks those that the rest of the machine disturbed.

    Attributes:
        taken: the payloads that the loader took, one unless it was not the same each time; empty of a raw cell.
    """

    medians_ms: Sequence[float]
    num_disturbed: int
    max_abs_err: float
    taken: Sequence[str] = ()


def plan() -> list[Table]:
    """The tables of the three cliffs, as far as this machine can fill them.

    Raises:
        UsageError: it is of no x86-64 level that packages are built for.
    """
    machine = detect({})
    level = best_level(machine.classes)
    if level is None:
        raise UsageError(f"nothing to measure: {'; '.join(f'{name}: {why}' for name, why in machine.why_not.items())}")
    num_threads = min(2, available_threads())
    counts = tuple(range(1, num_threads + 1))
    classes = [name for name in (V3, V4) if name in machine.classes]
    resnet18 = {name: Build(model="resnet18", device_class=name, counts=(num_threads,), dynamic=name == level) for name in classes}
    mobilenet = {name: Build(model="mobilenet-v2", device_class=name, counts=counts, dynamic=name == level) for name in classes}
    isa_missing = None if V4 in machine.classes else f"Not measured: {machine.why_not[V4]}, so no payload for {V4} runs here."
    threads_missing = None if num_threads == 2 else "Not measured: this process may use one CPU only."
    return [
        isa_table(resnet18, num_threads, isa_missing),
        *(threads_table(build, name, threads_missing) for name, build in mobilenet.items()),
        shape_table([resnet18[level], mobilenet[level]], num_threads),
    ]


def isa_table(builds: Mapping[str, Build], num_threads: int, missing: str | None) -> Table:
    """Each class's payload under the limits of each class."""
    rows = {
        f"`{name}`": [
            Cell(build=build, built_with=num_threads, limits_of=limits_of, num_threads=num_threads) for limits_of in builds
        ]
        for name, build in builds.items()
    }
    after = {
        f"under the limits of `{name}`": (
            Served(build=build, limits_of=name, num_threads=num_threads),
            [cell for row in rows.values() for cell in row if cell.limits_of == name],
        )
        for name, build in builds.items()
    }
    title = f"Instruction set: resnet18, {threads_text(num_threads)}"
    columns = [f"run under the limits of `{name}`" for name in builds]
    if missing:
        return Table(title=title, corner="built for", missing=missing)
    return Table(title=title, corner="built for", columns=columns, rows=rows, after=after)


def threads_table(build: Build, class_name: str, missing: str | None) -> Table:
    """Each thread count's payload with each thread count. Whether there is a cliff depends on the kernels, so on the class."""
    rows = {
        threads_text(num): [Cell(build=build, built_with=num, limits_of=class_name, num_threads=other) for other in build.counts]
        for num in build.counts
    }
    after = {
        f"with {threads_text(num)}": (
            Served(build=build, limits_of=class_name, num_threads=num),
            [cell for row in rows.values() for cell in row if cell.num_threads == num],
        )
        for num in build.counts
    }
    columns = [f"run with {threads_text(num)}" for num in build.counts]
    title = f"Threads: mobilenet-v2, `{class_name}`"
    if missing:
        return Table(title=title, corner="built with", missing=missing)
    return Table(title=title, corner="built with", columns=columns, rows=rows, after=after)


def shape_table(builds: Sequence[Build], num_threads: int) -> Table:
    """The payload for batch 1 and the one for all batches, both at batch 1."""
    level = builds[0].device_class

    def cell(build: Build, shape: Literal["static", "dynamic"]) -> Cell:
        return Cell(build=build, built_with=num_threads, shape=shape, limits_of=level, num_threads=num_threads)

    rows = {build.model: [cell(build, "static"), cell(build, "dynamic")] for build in builds}
    after = {
        f"{build.model} at batch 1": (Served(build=build, limits_of=level, num_threads=num_threads), rows[build.model])
        for build in builds
    }
    title = f"Shape: run at batch 1, `{level}`, {threads_text(num_threads)}"
    columns = ["built for batch 1", f"built for batches 1 to {BATCH_MAX}"]
    return Table(title=title, corner="model", columns=columns, rows=rows, after=after)


def measure(places: Sequence[Cell | Served], folder: Path, repeats: int) -> dict[Cell | Served, Figure]:
    """Build what the cells need, then run each of them in `repeats` processes, in a fresh random order each time.

    Builds go side by side, for nobody times them; what they pack depends on the thread count, not on the load.
    """
    builds = list(dict.fromkeys(place.build for place in places))
    with ThreadPoolExecutor(max_workers=available_threads()) as pool:
        list(pool.map(partial(build_apart, folder=folder), builds))
    store = _publish(builds, folder)
    shuffle = random.Random(0)
    found: dict[Cell | Served, list[Mapping[str, Any]]] = defaultdict(list)
    for index in range(repeats):
        started = time.monotonic()
        order = list(places)
        shuffle.shuffle(order)
        for place in order:
            job = {**place.job, "folder": str(folder / str(place.build)), "store": str(store)}
            found[place].append(_child(job, place.limits_of, JudgeError))
        _say(f"repeat {index + 1} of {repeats}: {len(places)} cells in {time.monotonic() - started:.0f} s")
    return {place: _figure(results) for place, results in found.items()}


def _publish(builds: Sequence[Build], folder: Path) -> Path:
    """A store with the artifacts of every class of each model."""
    store = Store.open(str(folder / "store"), create=True)
    for model in dict.fromkeys(build.model for build in builds):
        artifacts = {
            build.device_class: Artifact.read(folder / str(build) / "artifact") for build in builds if build.model == model
        }
        store.publish(model, source_key=model, artifacts=artifacts, carried={})
    return folder / "store"


def build_apart(build: Build, folder: Path) -> None:
    """Build in a process that holds the limits of the class."""
    own = folder / str(build)
    own.mkdir()
    started = time.monotonic()
    _child({"do": "build", **asdict(build), "folder": str(own)}, build.device_class, BuildError)
    _say(f"built {build} in {time.monotonic() - started:.0f} s")


def _figure(results: Sequence[Mapping[str, Any]]) -> Figure:
    medians = [result["median_ms"] for result in results if result["median_ms"] is not None]
    worst = max(result["max_abs_err"] for result in results)
    taken = tuple(dict.fromkeys(result["taken"] for result in results if "taken" in result))
    return Figure(medians_ms=medians, num_disturbed=len(results) - len(medians), max_abs_err=worst, taken=taken)


def _child(job: Mapping[str, Any], limits_of: str, error: type[BuildError | JudgeError]) -> dict[str, Any]:
    """The result of a job done by a new Python that holds only the limits of a class."""
    environ = {name: value for name, value in os.environ.items() if name not in LIMIT_VARIABLES}
    command = [sys.executable, "-m", "benchmarks.cliffs", "--job", json.dumps(job)]
    environ |= DEVICE_CLASSES[limits_of].limits
    try:
        done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=CHILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise error(f"{job}: no result after {CHILD_TIMEOUT_S:g} s") from None
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            return dict(json.loads(line.removeprefix(RESULT)))
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    raise error(f"{job}: exit code {done.returncode}: {last}")


def render(tables: Sequence[Table], figures: Mapping[Cell | Served, Figure], repeats: int, command: str) -> str:
    """All of it as Markdown."""
    lines = [f"# Cliffs, {datetime.datetime.now().astimezone().date().isoformat()}", "", f"`{command}`", "", *_where(), ""]
    lines += [
        f"A cell holds the median over {repeats} process{'es' if repeats != 1 else ''} of their median latency in ms, the least",
        "and the greatest of these, and the greatest absolute error of any output against the model in float64.",
        "Batch 1, float32, random weights, recipe `inductor-frozen`.",
    ]
    for table in tables:
        lines += ["", f"## {table.title}", ""]
        if table.rows is None:
            lines.append(str(table.missing))
            continue
        lines.append(f"| {table.corner} | {' | '.join(table.columns)} |")
        lines.append("|---" * (len(table.columns) + 1) + "|")
        lines += [f"| {name} | {' | '.join(_text(figures[cell]) for cell in cells)} |" for name, cells in table.rows.items()]
        lines += ["", "| run | `freezer.load` takes | which runs in | of the best raw cell there |", "|---|---|---|---|"]
        lines += [
            f"| {name} | {', '.join(f'`{taken}`' for taken in figures[served].taken)} | {_text(figures[served])} | "
            f"{_against(figures[served], [figures[cell] for cell in cells])} |"
            for name, (served, cells) in (table.after or {}).items()
        ]
    return "\n".join(lines) + "\n"


def _text(figure: Figure) -> str:
    disturbed = f"; {figure.num_disturbed} disturbed" if figure.num_disturbed else ""
    if not figure.medians_ms:
        return f"disturbed; error {figure.max_abs_err:.1e}"
    middle, low, high = statistics.median(figure.medians_ms), min(figure.medians_ms), max(figure.medians_ms)
    return f"**{_ms(middle)}** ({_ms(low)} to {_ms(high)}{disturbed}); error {figure.max_abs_err:.1e}"


def _against(served: Figure, raw: Sequence[Figure]) -> str:
    """How long what the loader took needs of the best raw cell's time."""
    best, own = best_of([figure.medians_ms for figure in raw]), best_of([served.medians_ms])
    return "disturbed" if best is None or own is None else f"{own / best:.2f} of {_ms(best)} ms"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _where() -> list[str]:
    """The machine and the versions, one line each."""
    import transformers

    from freezer.freezing.target.target import toolchain
    from freezer.runtime.fingerprint import host_fingerprint

    host, made = host_fingerprint(), toolchain()
    preload = f", LD_PRELOAD={os.environ['LD_PRELOAD']}" if os.environ.get("LD_PRELOAD") else ""
    classes = ", ".join(f"`{name}`" for name in detect({}).classes)
    return [
        f"- Machine: {host['cpu']}, {host['affinity']} of {host['num_cpus']} CPUs, Linux {host['kernel']}, "
        f"classes {classes}{preload}",
        f"- Versions: torch {made['torch']}, oneDNN {made['onednn']}, transformers {transformers.__version__}, "
        f"Python {made['python']}, {made['cxx']}",
    ]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Print the tables; with --out, write them too."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cliffs", description="Measure the cliffs of packed weights again.")
    parser.add_argument("--repeats", type=int, default=3, help="processes that measure each cell")
    parser.add_argument("--out", type=Path, help="a Markdown file to write besides")
    parser.add_argument("--only", default="", help="tables whose titles hold this word alone: instruction, threads, shape")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job is not None:
        result = JOBS[given.job["do"]](given.job)
        print(f"\n{RESULT}{json.dumps(result)}", flush=True)
        return
    tables = [table for table in plan() if given.only.lower() in table.title.lower()]
    places = list(dict.fromkeys(place for table in tables for place in table.places))
    with tempfile.TemporaryDirectory(prefix="cliffs-") as folder:
        figures = measure(places, Path(folder), given.repeats)
    text = render(tables, figures, given.repeats, f"python -m benchmarks.cliffs {shlex.join(sys.argv[1:])}".strip())
    print(text)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
