"""Retrain models of the zoo night after night, and compare the items an hour with a full contest.

python -m benchmarks.retrain --nights 8 [--models gpt vit]

Night 0 times every recipe of each architecture. Each further night has other weights, and inherits
the speed of the recipe that won. Every night is a campaign of its own into one new store. The page
goes to benchmarks/results.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.pages import ROOT, machine, markdown_table, results_page
from benchmarks.recipes import outcomes_of
from freezer.store import WORK, Store

MODELS = ("convnext", "vit", "swin", "gpt", "llama")
"""Models of examples/zoo.yaml with random weights, which a seed changes."""

HEAD = ("night", "s", "items an hour", "outcomes", "builds", "objects compiled")


@dataclass(frozen=True, kw_only=True)
class Night:
    """One campaign.

    Attributes:
        seconds: wall time of the command, with the start of Ray.
        outcomes: count of each verdict, with its clock.
        num_builds: candidates that were built.
        num_objects: C++ sources that were compiled.
    """

    seconds: float
    outcomes: Counter[str]
    num_builds: int
    num_objects: int

    @property
    def items_per_hour(self) -> float:
        """Models and classes decided in an hour."""
        return 3600 * self.outcomes.total() / self.seconds


def run_night(folder: Path, number: int, models: Sequence[str]) -> Night:
    """Run the campaign of a night over models of the zoo."""
    zoo = yaml.safe_load((ROOT / "examples" / "zoo.yaml").read_text())
    entries: list[dict[str, Any]] = [each for each in zoo["models"] if each["name"] in models]
    for entry in entries:
        entry["seed"] = number
    (folder / "catalog.yaml").write_text(yaml.safe_dump({"models": entries}))
    before = _num_objects(folder)
    command = [sys.executable, "-m", "freezer.cli", "optimize", "catalog.yaml"]
    command += ["--campaign", f"night-{number}"]
    started = time.monotonic()
    done = subprocess.run(command, cwd=folder, check=False)
    seconds = time.monotonic() - started
    outcomes = outcomes_of(Store.open(str(folder / "store")), f"night-{number}")
    if done.returncode not in (0, 1) or not outcomes:
        sys.exit(f"night {number} ended with exit code {done.returncode}")
    return Night(
        seconds=seconds,
        outcomes=Counter(f"{outcome.verdict} ({outcome.clock})" for outcome in outcomes),
        num_builds=sum(
            candidate.failure is None for outcome in outcomes for candidate in outcome.candidates
        ),
        num_objects=_num_objects(folder) - before,
    )


def _num_objects(folder: Path) -> int:
    objects = folder / "store" / WORK / "objects"
    return sum(1 for _ in objects.iterdir()) if objects.is_dir() else 0


def page(nights: list[Night], models: Sequence[str]) -> str:
    """The page of results."""
    rows = []
    for number, night in enumerate(nights):
        verdicts = ", ".join(f"{count} {name}" for name, count in night.outcomes.items())
        rows.append(
            [
                str(number),
                f"{night.seconds:.0f}",
                f"{night.items_per_hour:.0f}",
                verdicts,
                str(night.num_builds),
                str(night.num_objects),
            ]
        )
    contest, *retrained = nights
    seconds = sum(night.seconds for night in retrained)
    items = sum(night.outcomes.total() for night in retrained)
    per_hour = 3600 * items / seconds
    lines = [
        "# Retrained models",
        "",
        f"`python -m benchmarks.retrain --nights {len(retrained)} --models {' '.join(models)}`",
        "",
        *machine(),
        "",
        *markdown_table(HEAD, rows),
        "",
        (
            f"{items} outcomes of retrained models took {seconds:.0f} s: {per_hour:.0f} items an"
            f" hour, {per_hour / contest.items_per_hour:.1f} times those of the full contest."
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the nights, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nights", type=int, default=8)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    given = parser.parse_args()
    if given.nights < 1:
        parser.error("--nights: at least 1, which is compared with the full contest")
    names = list(dict.fromkeys(given.models))
    with tempfile.TemporaryDirectory() as name:
        nights = [run_night(Path(name), number, names) for number in range(given.nights + 1)]
    text = page(nights, names)
    results_page("retrain").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
