"""Run the zoo on a cluster of two unlike nodes on this machine, each with a core of its own, and write what came of each model.

    python -m examples.prepare zoo
    python -m benchmarks.two_nodes [--only 'vit*'] [--out benchmarks/results/two-nodes-DATE.md]

One node serves x86-64-v4, the other is told to be an x86-64-v3; one campaign asks for both classes. What is for v3 is built and
judged under the limits of v3. Needs a CPU of x86-64-v4 and two cores.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.machine import where
from benchmarks.recipes import outcomes_of
from freezer.store.store import Store
from pipeline.records.outcome import Outcome
from tests.raylets import RayCluster

ROOT = Path(__file__).resolve().parent.parent
CLASSES = ("cpu-x86-64-v4", "cpu-x86-64-v3")
CAMPAIGN = "zoo"
HEAD = ("model", "device class", "verdict", "recipe", "speedup (95%)", "eager ms", "ms", "error ratio", "build s", "judge s")


def run(folder: Path, only: str | None) -> tuple[int, float, list[Outcome]]:
    """The campaign on its cluster: its exit code, its time in seconds, its outcomes."""
    command = [sys.executable, "-W", "ignore", "-m", "jobs.optimize", str(ROOT / "examples" / "zoo.yaml"), "--campaign", CAMPAIGN]
    command += ["--store", str(folder / "store"), "--tracking-uri", f"sqlite:///{ROOT / 'mlflow.db'}"]
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


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The lines of the table: one for each outcome."""
    yield f"| {' | '.join(HEAD)} |"
    yield "|" + "---|" * len(HEAD)
    for outcome in outcomes:
        yield f"| {outcome.model} | {outcome.device_class} | {' | '.join(_cells(outcome))} |"


def _cells(outcome: Outcome) -> Iterator[str]:
    yield outcome.verdict
    yield outcome.recipe or ""
    interval = outcome.figures.speedup_ci
    yield f"{outcome.figures.speedup:.2f} ({interval[0]:.2f}-{interval[1]:.2f})" if outcome.figures.speedup and interval else ""
    for key in ("eager_p50", "p50"):
        value = (outcome.figures.latency_ms or {}).get(key)
        yield "" if value is None else f"{value:.3g}"
    ratio = (outcome.figures.drift or {}).get("error_ratio")
    yield "" if ratio is None else f"{ratio:.2f}"
    yield f"{outcome.build_s:.1f}"
    yield f"{outcome.judge_s:.1f}"


def versions(store: Store) -> Iterator[str]:
    """How many models have which classes in their newest version."""
    served = Counter(tuple(sorted(store.version(model).images)) for model in store.models())
    for classes, count in served.most_common():
        yield f"- {count} with artifacts for {', '.join(f'`{name}`' for name in classes)} in one version"


def main() -> None:
    """Run, and write the table; the exit code is the campaign's."""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a glob: only entries whose names match")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / f"two-nodes-{day}.md")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coldpress-two-nodes-") as scratch:
        exit_code, wall_s, outcomes = run(Path(scratch), given.only)
        served = list(versions(Store.open(str(Path(scratch) / "store"))))
    verdicts = ", ".join(f"{count} {name}" for name, count in Counter(outcome.verdict for outcome in outcomes).most_common())
    lines = [
        f"# The zoo on two nodes, {day}",
        "",
        f"`python -m benchmarks.two_nodes{f' --only {given.only!r}' if given.only else ''}`",
        "",
        *where(),
        "",
        f"One campaign, a node of one core for each of {' and '.join(f'`{name}`' for name in CLASSES)}. Exit code {exit_code} "
        f"after {wall_s:.0f} s: {verdicts}. Of the models, in the store:",
        "",
        *served,
        "",
        *table(outcomes),
    ]
    given.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
