"""Measure again the three cliffs that packed weights have: instruction set, thread count and shape.

    python -m benchmarks.cliffs [--repeats 3] [--out benchmarks/results/cliffs-2026-11-20.md]

A payload is fast only where it was made for, and this measures how much slower it is elsewhere. Every build and every
measurement is a process of its own whose environment holds a class's limits before Python starts, since oneDNN reads them once.
Payloads are opened raw: the loader would refuse most of these cells. Cells are measured in a fresh random order in each repeat.
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
from typing import TYPE_CHECKING, Any, Literal

from freezer.device_class import DEVICE_CLASSES, available_threads, best_level, detect
from freezer.errors import BuildError, JudgeError, UsageError
from freezer.limits import SamplingPolicy
from freezer.sources import Source, load_source
from freezer.spec import Dim, InputSpec, TensorSpec

if TYPE_CHECKING:
    from torch import nn

ROOT = Path(__file__).resolve().parent.parent
V3, V4 = "cpu-x86-64-v3", "cpu-x86-64-v4"
BATCH_MAX = 16
NUM_INPUTS = 4
CHILD_TIMEOUT_S = 300.0
INPUT = "pixel_values"
RESULT = "cliffs-result:"
POLICY = SamplingPolicy(time_limit_s=2.5, warmup_s=1.0, percentiles=("p50",), min_rounds=3)

LIMIT_VARIABLES = {name for known in DEVICE_CLASSES.values() for name in known.limits} | {
    "DNNL_MAX_CPU_ISA",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
}
"""Taken out of the environment of the children, so that only what a cell says holds."""

SOURCES: Mapping[str, Source] = {
    "resnet18": Source(
        kind="transformers",
        location="ResNetForImageClassification",
        weights="random",
        args={
            "layer_type": "basic",
            "embedding_size": 64,
            "hidden_sizes": [64, 128, 256, 512],
            "depths": [2, 2, 2, 2],
            "num_labels": 1000,
        },
    ),
    "mobilenet-v2": Source(
        kind="transformers",
        location="MobileNetV2ForImageClassification",
        weights="random",
        args={"tf_padding": False, "num_labels": 1000},
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """One package to build; `dynamic` makes one for batches from 1 to BATCH_MAX beside the one for batch 1."""

    model: str
    device_class: str
    num_threads: int
    dynamic: bool

    def __str__(self) -> str:
        return f"{self.model}_{self.device_class}_{self.num_threads}-threads"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One payload, run at batch 1 under the limits of a class and with a number of threads."""

    build: Build
    shape: Literal["static", "dynamic"] = "static"
    limits_of: str
    num_threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of cells, row by row; `missing` says why there are none."""

    title: str
    corner: str
    columns: Sequence[str] = ()
    rows: Mapping[str, Sequence[Cell]] | None = None
    missing: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """What the processes of one cell measured; `medians_ms` lacks those that the rest of the machine disturbed."""

    medians_ms: Sequence[float]
    num_disturbed: int
    max_abs_err: float


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
    resnet18 = {
        name: Build(model="resnet18", device_class=name, num_threads=num_threads, dynamic=name == level)
        for name in (V3, V4)
        if name in machine.classes
    }
    mobilenet = {
        name: {
            num: Build(model="mobilenet-v2", device_class=name, num_threads=num, dynamic=name == level and num == num_threads)
            for num in range(1, num_threads + 1)
        }
        for name in resnet18
    }
    isa_missing = None if V4 in machine.classes else f"Not measured: {machine.why_not[V4]}, so no payload for {V4} runs here."
    threads_missing = None if num_threads == 2 else "Not measured: this process may use one CPU only."
    return [
        isa_table(resnet18, num_threads, isa_missing),
        *(threads_table(builds, name, threads_missing) for name, builds in mobilenet.items()),
        shape_table([resnet18[level], mobilenet[level][num_threads]]),
    ]


def isa_table(builds: Mapping[str, Build], num_threads: int, missing: str | None) -> Table:
    """Each class's payload under the limits of each class."""
    rows = {
        f"`{name}`": [Cell(build=build, limits_of=limits_of, num_threads=num_threads) for limits_of in builds]
        for name, build in builds.items()
    }
    title = f"Instruction set: resnet18, {_threads(num_threads)}"
    columns = [f"run under the limits of `{name}`" for name in builds]
    return Table(title=title, corner="built for", columns=columns, rows=None if missing else rows, missing=missing)


def threads_table(builds: Mapping[int, Build], class_name: str, missing: str | None) -> Table:
    """Each thread count's payload with each thread count. Whether there is a cliff depends on the kernels, so on the class."""
    rows = {
        _threads(num): [Cell(build=build, limits_of=class_name, num_threads=other) for other in builds]
        for num, build in builds.items()
    }
    columns = [f"run with {_threads(num)}" for num in builds]
    title = f"Threads: mobilenet-v2, `{class_name}`"
    return Table(title=title, corner="built with", columns=columns, rows=None if missing else rows, missing=missing)


def shape_table(builds: Sequence[Build]) -> Table:
    """The payload for batch 1 and the one for all batches, both at batch 1."""

    def cell(build: Build, shape: Literal["static", "dynamic"]) -> Cell:
        return Cell(build=build, shape=shape, limits_of=build.device_class, num_threads=build.num_threads)

    rows = {build.model: [cell(build, "static"), cell(build, "dynamic")] for build in builds}
    title = f"Shape: run at batch 1, `{builds[0].device_class}`, {_threads(builds[0].num_threads)}"
    return Table(title=title, corner="model", columns=["built for batch 1", f"built for batches 1 to {BATCH_MAX}"], rows=rows)


def _threads(num: int) -> str:
    return "1 thread" if num == 1 else f"{num} threads"


def measure(cells: Sequence[Cell], folder: Path, repeats: int) -> dict[Cell, Figure]:
    """Build what the cells need, then run each of them in `repeats` processes, in a fresh random order each time.

    Builds go side by side, for nobody times them; what they pack depends on the thread count, not on the load.
    """
    builds = list(dict.fromkeys(cell.build for cell in cells))
    with ThreadPoolExecutor(max_workers=available_threads()) as pool:
        list(pool.map(partial(build_apart, folder=folder), builds))
    shuffle = random.Random(0)
    found: dict[Cell, list[Mapping[str, Any]]] = defaultdict(list)
    for index in range(repeats):
        started = time.monotonic()
        order = list(cells)
        shuffle.shuffle(order)
        for cell in order:
            job = {"do": "measure", **asdict(cell), "folder": str(folder / str(cell.build))}
            found[cell].append(_child(job, cell.limits_of, JudgeError))
        _say(f"repeat {index + 1} of {repeats}: {len(cells)} cells in {time.monotonic() - started:.0f} s")
    return {cell: _figure(results) for cell, results in found.items()}


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
    return Figure(medians_ms=medians, num_disturbed=len(results) - len(medians), max_abs_err=worst)


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


def do_build(job: Mapping[str, Any]) -> dict[str, Any]:
    """In a child: build, and write inputs at batch 1 with the float64 model's answers beside the payloads."""
    import safetensors.torch
    import torch

    from freezer.build import build
    from freezer.outputs import leaves_of
    from freezer.recipes import RECIPES
    from freezer.samples import generate_at
    from freezer.subject import call_source, prepare
    from freezer.target import target_here

    folder, spec = Path(job["folder"]), _spec(dynamic=job["dynamic"])
    subject = prepare(job["model"], load_model(job["model"]), spec)
    build(subject, RECIPES["inductor-frozen"], target_here(job["device_class"], job["num_threads"]), folder)
    reference = subject.fresh().double()
    inputs = {str(i): generate_at(spec, spec.first_point(), seed=i).tensors[INPUT] for i in range(NUM_INPUTS)}
    answers = {key: leaves_of(call_source(reference, spec, {INPUT: given.double()}))[0] for key, given in inputs.items()}
    safetensors.torch.save_file(inputs, folder / "inputs.safetensors")
    safetensors.torch.save_file(
        {key: answer.to(torch.float64).contiguous() for key, answer in answers.items()}, folder / "answers.safetensors"
    )
    return {}


def do_measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """In a child: open a payload as it is, hold its outputs against the answers, and time it."""
    import safetensors.torch
    import torch

    from freezer.build import Candidate, lowering_module
    from freezer.latency import sample

    folder = Path(job["folder"])
    torch.set_num_threads(job["num_threads"])
    candidate = Candidate.read(folder)
    payload = candidate.payloads[0 if job["shape"] == "static" else -1]
    run = lowering_module(payload.kind).open_payload(folder / payload.path, candidate.settings)
    inputs = safetensors.torch.load_file(folder / "inputs.safetensors")
    answers = safetensors.torch.load_file(folder / "answers.safetensors")
    with torch.no_grad():
        max_abs_err = max(float((run(given)[0].double() - answers[key]).abs().max()) for key, given in inputs.items())
        sampling = sample({"payload": [partial(run, given) for given in inputs.values()]}, POLICY)
    return {
        "median_ms": statistics.median(sampling.pooled("payload")) if sampling.stable else None,
        "max_abs_err": max_abs_err,
    }


def load_model(name: str) -> nn.Module:
    """The model with random weights whose activations keep their scale through the layers.

    transformers' own initialization of MobileNetV2 lets them fade to 1e-21, where any output looks right.
    """
    import torch

    model = load_source(SOURCES[name])
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight)
    return model


def _spec(*, dynamic: bool) -> InputSpec:
    size = "batch" if dynamic else 1
    dims = (Dim(name="batch", min=1, max=BATCH_MAX),) if dynamic else ()
    return InputSpec(inputs=(TensorSpec(name=INPUT, dtype="float32", shape=(size, 3, 224, 224)),), dims=dims)


def render(tables: Sequence[Table], figures: Mapping[Cell, Figure], repeats: int, command: str) -> str:
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
    return "\n".join(lines) + "\n"


def _text(figure: Figure) -> str:
    disturbed = f"; {figure.num_disturbed} disturbed" if figure.num_disturbed else ""
    if not figure.medians_ms:
        return f"disturbed; error {figure.max_abs_err:.1e}"
    middle, low, high = statistics.median(figure.medians_ms), min(figure.medians_ms), max(figure.medians_ms)
    return f"**{_ms(middle)}** ({_ms(low)} to {_ms(high)}{disturbed}); error {figure.max_abs_err:.1e}"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _where() -> list[str]:
    """The machine and the versions, one line each."""
    import transformers

    from freezer.target import host_fingerprint, toolchain

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
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job is not None:
        result = {"build": do_build, "measure": do_measure}[given.job["do"]](given.job)
        print(f"\n{RESULT}{json.dumps(result)}", flush=True)
        return
    tables = plan()
    cells = list(dict.fromkeys(cell for table in tables for row in (table.rows or {}).values() for cell in row))
    with tempfile.TemporaryDirectory(prefix="cliffs-") as folder:
        figures = measure(cells, Path(folder), given.repeats)
    text = render(tables, figures, given.repeats, f"python -m benchmarks.cliffs {shlex.join(sys.argv[1:])}".strip())
    print(text)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
