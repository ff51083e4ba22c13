"""Measure whether the threads of another engine disturb torch's, when both are timed in one process
as a judge does.

    python -m benchmarks.engine_threads [--repeats 5] [--threads 2]

Two copies of one TorchScript payload are timed beside eager, alone and together with a payload of
OpenVINO, or of ONNX Runtime: with the recipe's settings, and with its threads spinning between
calls as they do by default. Without disturbance the ratio of the copies is 1 in every contest, and
the first copy is as fast in all of them. The contests of a repeat run in random order, each in a
process of its own, because threads that spin do not stop.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.pages import machine, markdown_table, results_page
from freezer.artifact import PayloadKind
from freezer.freezing.candidates import build
from freezer.freezing.models import SubjectOptions, example_spec, prepare
from freezer.freezing.recipes import RECIPES
from freezer.freezing.target import class_here, target_here
from freezer.runtime.loaders import LOADERS, open_torchscript
from freezer.spec import SamplingPolicy
from freezer.timing import sample, speedup

SHAPE = (1, 3, 64, 64)
POLICY = SamplingPolicy(time_limit_s=10, warmup_s=1, accept_noise=True)

CONTESTS: Mapping[str, tuple[PayloadKind, Mapping[str, Any]] | None] = {
    "torch alone": None,
    "with ONNX Runtime": ("onnxruntime", RECIPES["onnxruntime"].settings),
    "with ONNX Runtime, spinning": ("onnxruntime", {}),
    "with OpenVINO": ("openvino", RECIPES["openvino"].settings),
}
"""The engine that takes part, and the settings of its payload; None: none does."""


def model() -> nn.Module:
    """A convnet that takes some milliseconds."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in (3, 64, 64, 64):
        layers += [nn.Conv2d(inputs, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()


def payloads(folder: Path, num_threads: int) -> dict[str, str]:
    """Build the payloads; return their paths by kind."""
    spec, example = example_spec([torch.randn(SHAPE)], {})
    subject = prepare("convnet", model(), spec, [example], SubjectOptions(fill_up=True))
    found: dict[str, str] = {}
    for name in ("torchscript-frozen", "onnxruntime", "openvino"):
        (folder / name).mkdir()
        candidate = build(
            subject, RECIPES[name], target_here(class_here(["float32"]), num_threads), folder / name
        )
        found[candidate.payloads[0].kind] = str(folder / name / candidate.payloads[0].path)
    return found


def contest(paths: Mapping[str, str], name: str, num_threads: int) -> dict[str, Any]:
    """Time a contest in this process; return the first copy's median in ms, and the ratio of the
    copies with its bounds.
    """
    torch.set_num_threads(num_threads)
    x = torch.randn(SHAPE)
    runners: dict[str, Any] = {
        "eager": model(),
        **{copy: open_torchscript(Path(paths["torchscript"]), {}) for copy in "ab"},
    }
    if (engine := CONTESTS[name]) is not None:
        kind, settings = engine
        runners[kind] = LOADERS[kind](Path(paths[kind]), settings)
    with torch.no_grad():
        sampling = sample({entrant: [partial(run, x)] for entrant, run in runners.items()}, POLICY)
    ratio = speedup(sampling, "b", eager="a", num_candidates=1, policy=POLICY)
    return {
        "a_ms": statistics.median(sampling.pooled("a")),
        "ratio": [ratio.value, ratio.low, ratio.high],
        "dropped": sampling.num_dropped,
    }


def child(paths: Mapping[str, str], name: str, num_threads: int) -> dict[str, Any]:
    """Run a contest in a fresh process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.engine_threads",
        "--child",
        json.dumps([paths, name]),
        "--threads",
        str(num_threads),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def page(results: Mapping[str, Sequence[Mapping[str, Any]]], command: str) -> str:
    """The table: medians over the repeats, with their ranges."""
    alone = statistics.median(item["a_ms"] for item in results["torch alone"])
    rows = []
    for name, found in results.items():
        ratios, times_ms = [item["ratio"][0] for item in found], [item["a_ms"] for item in found]
        held = sum(item["ratio"][1] <= 1 <= item["ratio"][2] for item in found)
        rows.append(
            [
                name,
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
                f"{held} of {len(found)}",
                f"{statistics.median(times_ms):.3f} ({min(times_ms):.3f}-{max(times_ms):.3f})",
                f"{statistics.median(times_ms) / alone:.3f}",
            ]
        )
    header = [
        "contest",
        "ratio of the copies (range)",
        "interval contains 1",
        "first copy ms (range)",
        "against alone",
    ]
    lines = [
        "# Do an engine's threads disturb torch's?",
        "",
        *machine(),
        f"- Command: `{command}`",
        "",
    ]
    return "\n".join([*lines, *markdown_table(header, rows), ""])


def main() -> None:
    """Run all contests and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=results_page("engine-threads"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        paths, name = json.loads(options.child)
        print(json.dumps(contest(paths, name, options.threads)))
        return
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        paths = payloads(Path(folder), options.threads)
        for number in range(options.repeats):
            for name in random.Random(number).sample(list(CONTESTS), len(CONTESTS)):
                results[name].append(child(paths, name, options.threads))
                print(number, name, results[name][-1], file=sys.stderr)
    ordered = {name: results[name] for name in CONTESTS}
    command = (
        f"python -m benchmarks.engine_threads --repeats {options.repeats} --threads"
        f" {options.threads}"
    )
    text = page(ordered, command)
    options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
