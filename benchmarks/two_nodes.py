"""Run the zoo on a cluster of two unlike nodes on this machine, each with one core, and write every
outcome.

    python -m examples.prepare zoo
    python -m benchmarks.two_nodes [--only 'vit*'] [--out benchmarks/results/two-nodes-DATE.md]

One node serves x86-64-v4, the other claims to be an x86-64-v3; one campaign asks for both classes.
Artifacts for v3 are built and judged under the limits of v3. Needs a CPU of x86-64-v4 and two
cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.pages import ROOT, machine, markdown_table, results_page, today
from benchmarks.recipes import outcomes_of, ratio_cell, speedup_cell
from freezer.store import Store
from pipeline.records import Outcome
from tests.support.raylets import RayCluster

CLASSES = ("cpu-x86-64-v4", "cpu-x86-64-v3")
CAMPAIGN = "zoo"
HEAD = (
    "model",
    "device class",
    "verdict",
    "recipe",
    "speedup (95%)",
    "eager ms",
    "ms",
    "error ratio",
    "build s",
    "judge s",
)


def run(folder: Path, only: str | None) -> tuple[int, float, list[Outcome]]:
    """Run the campaign on its cluster; return its exit code, its time in seconds, and its
    outcomes.
    """
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "jobs.optimize",
        str(ROOT / "examples" / "zoo.yaml"),
        "--campaign",
        CAMPAIGN,
    ]
    command += [
        "--store",
        str(folder / "store"),
        "--tracking-uri",
        f"sqlite:///{ROOT / 'mlflow.db'}",
    ]
    command += [word for name in CLASSES for word in ("--device-class", name)]
    with RayCluster(folder / "cluster") as cluster:
        for core, name in zip(sorted(os.sched_getaffinity(0)), CLASSES, strict=False):
            cluster.start(num_cpus=1, classes=[name], before=("taskset", "--cpu-list", str(core)))
        command += ["--address", cluster.address, *(["--only", only] if only else [])]
        began = time.monotonic()
        with cluster.popen(command) as driver:
            assert driver.stdout is not None
            for line in driver.stdout:
                sys.stderr.write(line)
        wall_s = time.monotonic() - began
    return driver.returncode, wall_s, outcomes_of(Store.open(str(folder / "store")), CAMPAIGN)


def _cells(outcome: Outcome) -> Iterator[str]:
    yield from (
        outcome.model,
        outcome.device_class,
        outcome.verdict,
        outcome.recipe or "",
        speedup_cell(outcome.figures),
    )
    latency_ms = outcome.figures.latency_ms
    for value in (latency_ms.eager_p50, latency_ms.p50):
        yield "" if value is None else f"{value:.3g}"
    yield from (ratio_cell(outcome.figures), f"{outcome.build_s:.1f}", f"{outcome.judge_s:.1f}")


def versions(store: Store) -> Iterator[str]:
    """The number of models for each set of classes in their newest versions."""
    served = Counter(tuple(sorted(store.version(model).images)) for model in store.models())
    for classes, count in served.most_common():
        yield (
            f"- {count} with artifacts for {', '.join(f'`{name}`' for name in classes)} in one"
            " version"
        )


def main() -> None:
    """Run the campaign and write the table; the exit code is the campaign's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="run only the entries whose names match this glob")
    parser.add_argument("--out", type=Path, default=results_page("two-nodes"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coldpress-two-nodes-") as scratch:
        exit_code, wall_s, outcomes = run(Path(scratch), given.only)
        served = list(versions(Store.open(str(Path(scratch) / "store"))))
    verdicts = ", ".join(
        f"{count} {name}"
        for name, count in Counter(outcome.verdict for outcome in outcomes).most_common()
    )
    lines = [
        f"# The zoo on two nodes, {today()}",
        "",
        f"`python -m benchmarks.two_nodes{f' --only {given.only!r}' if given.only else ''}`",
        "",
        *machine(),
        "",
        (
            "One campaign, a node of one core for each of"
            f" {' and '.join(f'`{name}`' for name in CLASSES)}. Exit code {exit_code} after"
            f" {wall_s:.0f} s: {verdicts}. Models in the store:"
        ),
        "",
        *served,
        "",
        *markdown_table(HEAD, [list(_cells(outcome)) for outcome in outcomes]),
    ]
    given.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
