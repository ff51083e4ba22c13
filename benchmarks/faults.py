"""Inject every fault of tests/faults into real clusters, and write what was lost, what was published and how long recovery took.

    python -m benchmarks.faults [--repeats 2] [--only WORDS] [--out benchmarks/results/faults-DATE.md]

Each scenario starts a cluster of its own on this machine, strikes a campaign in it, and holds the end to what must hold
(tests/faults/sites.py); here the tests run, and their JUnit reports become a table. Takes about a minute for each scenario.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.machine import where

ROOT = Path(__file__).resolve().parent.parent
UNDISTURBED = "nothing happens"
"""The scenario without a fault, against whose time the others are to be held."""

NO_SCENARIOS = ("table", "left", "failing_disk")
"""The groups of tests that strike no campaign: of what this file makes, and of what scenarios strike and check with."""

SPELLED = {"stores": "store's", "drivers": "driver's", "builds": "builds'", "mlflow": "MLflow", "ray": "Ray"}
"""Words that the name of a test cannot spell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One scenario of one run.

    Attributes:
        group: of scenarios: `processes`, `disks`, `network`.
        scenario: its name, in words.
        result: `passed`, `failed` or `skipped`.
        why: of one that was skipped or failed, the first line.
        properties: what the test recorded.
    """

    group: str
    scenario: str
    result: str
    why: str
    properties: dict[str, str]


def cases(report: Path) -> Iterator[Case]:
    """The scenarios of a JUnit report, in their order."""
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        result = "passed" if problem is None else "skipped" if problem.tag == "skipped" else "failed"
        why = (problem.get("message") or "").partition("\n")[0] if problem is not None else ""
        properties = {item.get("name", ""): item.get("value", "") for item in case.iter("property")}
        group = (case.get("classname") or "").rpartition(".")[2].removeprefix("test_")
        if group in NO_SCENARIOS:
            continue
        yield Case(group=group, scenario=_words(case.get("name", "")), result=result, why=why, properties=properties)


def _words(name: str) -> str:
    base, _, parameter = name.removeprefix("test_").partition("[")
    return f"{_spelled(base)} ({_spelled(parameter.rstrip(']'))})" if parameter else _spelled(base)


def _spelled(name: str) -> str:
    return " ".join(SPELLED.get(word, word) for word in re.split("[_-]", name))


def table(runs: Sequence[Sequence[Case]]) -> list[str]:
    """The lines of the table: one for each scenario, with the recovery of every run."""
    lines = [
        "| where | what happened | lost | published, whole and verified | the campaign went on | recovery, s |",
        "|---|---|---|---|---|---|",
    ]
    for first in runs[0]:
        same = [case for run in runs for case in run if (case.group, case.scenario) == (first.group, first.scenario)]
        passed = [case for case in same if case.result == "passed"]
        if not passed:
            lines.append(f"| {first.group} | {first.scenario} | | | {first.result}: {first.why} | |")
            continue
        found = passed[0].properties
        lost = " / ".join(dict.fromkeys(_lost(case) for case in passed))
        published = " / ".join(dict.fromkeys(_artifacts(int(case.properties["published"])) for case in passed))
        seconds = ", ".join(case.properties["recovery_s"] if case.result == "passed" else case.result for case in same)
        lines.append(f"| {first.group} | {first.scenario} | {lost} | {published} | {found['went_on']} | {seconds} |")
    return lines


def _artifacts(number: int) -> str:
    return f"{number} artifact{'' if number == 1 else 's'}"


def _lost(case: Case) -> str:
    lost = case.properties["lost"]
    return "nothing" if lost.startswith("0 of") else lost


def page(runs: Sequence[Sequence[Case]], *, day: str, command: str) -> str:
    """The whole result, in markdown."""
    counts = [f"{sum(case.result == 'passed' for case in run)} of {len(run)}" for run in runs]
    return "\n".join(
        [
            f"# Faults, really injected, {day}",
            "",
            f"`{command}`",
            "",
            *where(),
            "",
            f"Passed: {', then '.join(counts)}. Recovery is the time from the fault to the end of the campaign, the rest of its",
            f'work included; "{UNDISTURBED}" has that time without a fault.',
            "",
            *table(runs),
            "",
        ]
    )


def run(report: Path, only: str | None) -> list[Case]:
    """Run the scenarios once."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "cluster", "tests/faults"]
    command += ["-o", "junit_family=xunit1", f"--junitxml={report}", *(["-k", only] if only else [])]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)  # what failed is in the report
    return list(cases(report))


def main() -> None:
    """Run, and write the table; the exit code is 1 when a scenario failed."""
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description="Inject every fault, and write what came of it."
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of all scenarios, one after another")
    parser.add_argument("--only", help="scenarios whose names match, as pytest's -k takes it")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / f"faults-{day}.md", help="where the table goes"
    )
    parser.add_argument("--reports", type=Path, nargs="+", help="JUnit reports of runs that were made before; nothing is run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coldpress-faults-") as folder:
        made = (run(Path(folder) / f"{number}.xml", given.only) for number in range(given.repeats))
        runs = [list(cases(report)) for report in given.reports] if given.reports else list(made)
    words = [f"--repeats {len(runs)}", *([f"--only '{given.only}'"] if given.only else [])]
    if given.reports:
        words = [f"--reports {' '.join(report.name for report in given.reports)}"]
    text = page(runs, day=day, command=" ".join(["python -m benchmarks.faults", *words]))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(text)
    print(text)
    sys.exit(any(case.result == "failed" for found in runs for case in found))


if __name__ == "__main__":
    main()
