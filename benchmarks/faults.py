"""Run the scenarios of tests/faults, and write which passed, what was published and how long each
recovery took.

    python -m benchmarks.faults [--repeats 2] [--only WORDS] [--out
    benchmarks/results/faults-DATE.md]

Each scenario injects a fault into a campaign on a Ray cluster on this machine, and checks the end
(tests/support/fault_sites.py). The JUnit reports of these tests become a table. A scenario takes
about a minute.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.pages import ROOT, machine, markdown_table, results_page, today

UNDISTURBED = "nothing happens"
"""The scenario without a fault: the reference for the recovery times."""

GROUPS = ("disks", "processes", "network")
"""The test files with scenarios."""

SPELLED = {
    "stores": "store's",
    "drivers": "driver's",
    "builds": "builds'",
    "mlflow": "MLflow",
    "ray": "Ray",
}
"""Words that the name of a test cannot spell."""

HEAD = (
    "where",
    "what happened",
    "published, whole and verified",
    "the campaign went on",
    "recovery, s",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One scenario of one run.

    Attributes:
        group: `processes`, `disks` or `network`.
        scenario: its name, in words.
        result: `passed`, `failed` or `skipped`.
        why: the first line of the reason, unless it passed.
        properties: recorded by the test.
    """

    group: str
    scenario: str
    result: str
    why: str
    properties: dict[str, str]


def cases(report: Path) -> Iterator[Case]:
    """The scenarios of a JUnit report, in order."""
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next(
            (child for child in case if child.tag in ("failure", "error", "skipped")), None
        )
        result = (
            "passed" if problem is None else "skipped" if problem.tag == "skipped" else "failed"
        )
        why = (problem.get("message") or "").partition("\n")[0] if problem is not None else ""
        properties = {item.get("name", ""): item.get("value", "") for item in case.iter("property")}
        group = (case.get("classname") or "").rpartition(".")[2].removeprefix("test_")
        if group in GROUPS:
            yield Case(
                group=group,
                scenario=_words(case.get("name", "")),
                result=result,
                why=why,
                properties=properties,
            )


def _words(name: str) -> str:
    """`test_a_worker_is_killed[build]` as `a worker is killed (build)`."""
    spaced = re.sub(r"\[(.*)\]", r" (\1)", name.removeprefix("test_"))
    return re.sub(
        r"[a-z]+", lambda word: SPELLED.get(word[0], word[0]), re.sub("[_-]", " ", spaced)
    )


def table(runs: Sequence[Sequence[Case]]) -> list[str]:
    """The lines of the table: a row for each scenario, with the recovery of every run."""
    rows = []
    for first in runs[0]:
        same = [
            case
            for run in runs
            for case in run
            if (case.group, case.scenario) == (first.group, first.scenario)
        ]
        passed = [case.properties for case in same if case.result == "passed"]
        if not passed:
            rows.append((first.group, first.scenario, "", f"{first.result}: {first.why}", ""))
            continue
        published = " / ".join(dict.fromkeys(f"{found['published']} artifacts" for found in passed))
        seconds = ", ".join(
            case.properties["recovery_s"] if case.result == "passed" else case.result
            for case in same
        )
        rows.append((first.group, first.scenario, published, passed[0]["went_on"], seconds))
    return markdown_table(HEAD, rows)


def run(report: Path, only: str | None) -> list[Case]:
    """Run the scenarios once."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "-m",
        "cluster",
        "tests/faults",
    ]
    command += [
        "-o",
        "junit_family=xunit1",
        f"--junitxml={report}",
        *(["-k", only] if only else []),
    ]
    subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)  # failures are in the report
    return list(cases(report))


def main() -> None:
    """Run the scenarios and write the table; the exit code is 1 if a scenario failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description="Inject every fault, and write the results."
    )
    parser.add_argument("--repeats", type=int, default=1, help="how often to run all scenarios")
    parser.add_argument(
        "--only", help="run the scenarios whose names match, as pytest's -k takes it"
    )
    parser.add_argument(
        "--out", type=Path, default=results_page("faults"), help="where to write the table"
    )
    parser.add_argument(
        "--reports",
        type=Path,
        nargs="+",
        help="use the JUnit reports of earlier runs, and run nothing",
    )
    given = parser.parse_args()
    if given.reports:
        words = f"--reports {' '.join(report.name for report in given.reports)}"
        runs = [list(cases(report)) for report in given.reports]
    else:
        words = f"--repeats {given.repeats}" + (f" --only '{given.only}'" if given.only else "")
        with tempfile.TemporaryDirectory(prefix="coldpress-faults-") as folder:
            runs = [
                run(Path(folder) / f"{number}.xml", given.only) for number in range(given.repeats)
            ]
    passed = ", then ".join(
        f"{sum(case.result == 'passed' for case in found)} of {len(found)}" for found in runs
    )
    lines = [
        f"# Injected faults, {today()}",
        *("", f"`python -m benchmarks.faults {words}`", "", *machine(), ""),
        (
            f"Passed: {passed}. Recovery is the time from the fault to the end of the campaign,"
            " remaining work included;"
        ),
        f'"{UNDISTURBED}" has that time without a fault.',
        *("", *table(runs), ""),
    ]
    given.out.write_text("\n".join(lines))
    print("\n".join(lines))
    sys.exit(any(case.result == "failed" for found in runs for case in found))


if __name__ == "__main__":
    main()
