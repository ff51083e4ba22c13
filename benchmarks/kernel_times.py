"""Where the time of an `inductor-frozen` payload goes: kernels of oneDNN, kernels of Inductor, and
what is around them.

    python -m benchmarks.kernel_times                                   # the models of peers.yaml
    python -m benchmarks.kernel_times --models 'resnet50,swin*' --out mine.md

Each model is built by the recipe with Inductor's profiling of kernels, and called with all CPUs,
without and with torch's profiler. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import resource
import shlex
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.pages import ROOT, machine, markdown_table, results_page, today
from freezer.freezing.candidates import build
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import class_here, target_here
from freezer.hardware import available_cpus
from pipeline.catalog import Entry, read_catalog
from pipeline.worker.task_child import load_subject

KINDS = {
    "cpp_": "Inductor",
    "convolution": "convolution",
    "linear": "linear",
    "scaled_dot_product": "attention",
    "bmm": "attention",
}
"""Parts of kernels' names, and the columns that their times are added to; the first that matches.
"""

HEAD = ("model", "ms", "GFLOP/s", *dict.fromkeys(KINDS.values()), "rest", "page faults", "waits")

CALLS = 30


def main() -> None:
    """Build, profile and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("catalog", nargs="?", type=Path, default=ROOT / "benchmarks" / "peers.yaml")
    parser.add_argument(
        "--models", default="*", help="globs over names of models, separated by commas"
    )
    parser.add_argument(
        "--out", type=Path, default=results_page("kernel-times"), help="Markdown file"
    )
    given = parser.parse_args()
    torch.set_num_threads(available_cpus())
    rows = []
    for entry in read_catalog(given.catalog).entries:
        if any(fnmatch(entry.name, pattern) for pattern in given.models.split(",")):
            rows.append(_row(entry))
            print(" | ".join(rows[-1]), flush=True)
    text = (
        f"# Where the time of inductor-frozen goes, {today()}",
        "",
        f"`{shlex.join(['python', '-m', 'benchmarks.kernel_times', *sys.argv[1:]])}`",
        "",
        (
            f"`ms`: median of {CALLS} calls. The columns of kernels: ms and number of calls, under"
            " the profiler. Page faults and waits"
        ),
        "(voluntary context switches) are per call.",
        "",
    )
    given.out.write_text("\n".join([*text, *machine(), "", *markdown_table(HEAD, rows), ""]))


def _row(entry: Entry) -> Sequence[str]:
    """The figures of one model."""
    subject, target = (
        load_subject(entry),
        target_here(class_here(["float32"]), torch.get_num_threads()),
    )
    recipe = RECIPES["inductor-frozen"]
    settings = {
        **recipe.settings,
        "inductor": {**recipe.settings["inductor"], "cpp.enable_kernel_profile": True},
    }
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model = build(subject, replace(recipe, settings=settings), target, Path(folder)).open(
            subject
        )
        inputs = subject.sets[0].tensors
        call: Callable[[], Any] = lambda: model(**inputs)  # noqa: E731
        with FlopCounterMode(display=False) as flops:
            subject.model(**inputs)
        taken, faults, waits = _timed(call)
        spent, calls = _profiled(call)
    cells = [f"{spent[kind]:.2f} ({calls[kind]})" for kind in dict.fromkeys(KINDS.values())]
    rate = flops.get_total_flops() / taken / 1e6
    return (
        entry.name,
        f"{taken:.2f}",
        f"{rate:.0f}",
        *cells,
        f"{spent['rest']:.2f}",
        f"{faults:.0f}",
        f"{waits:.1f}",
    )


def _timed(call: Callable[[], Any]) -> tuple[float, float, float]:
    """The median latency in ms, and page faults and voluntary context switches per call."""
    for _ in range(10):
        call()
    before, taken = resource.getrusage(resource.RUSAGE_SELF), list[float]()
    for _ in range(CALLS):
        started = time.perf_counter()
        call()
        taken.append((time.perf_counter() - started) * 1e3)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return (
        statistics.median(taken),
        (after.ru_minflt - before.ru_minflt) / CALLS,
        (after.ru_nvcsw - before.ru_nvcsw) / CALLS,
    )


def _profiled(call: Callable[[], Any]) -> tuple[Mapping[str, float], Mapping[str, int]]:
    """Milliseconds and calls by kind of kernel, of one call of the model."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(CALLS):
            call()
    spent, calls = Counter[str](), Counter[str]()
    for event in profiled.key_averages():
        kind = next((kind for part, kind in KINDS.items() if part in event.key), "rest")
        spent[kind] += event.self_cpu_time_total / 1e3 / CALLS
        calls[kind] += event.count // CALLS
    return spent, calls


if __name__ == "__main__":
    main()
