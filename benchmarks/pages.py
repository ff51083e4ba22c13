"""Parts of the pages in benchmarks/results: tables, and the machine and versions of a
measurement.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path

from freezer.hardware import detect

ROOT = Path(__file__).resolve().parent.parent


def today() -> str:
    """The date, `2026-11-22`."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def results_page(name: str) -> Path:
    """Where today's results of a benchmark go."""
    return ROOT / "benchmarks" / "results" / f"{name}-{today()}.md"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [_row(head), "|---" * len(head) + "|", *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def machine() -> list[str]:
    """The machine and the versions, one line each; imports nothing large before it is called."""
    from importlib.metadata import version

    from freezer.freezing.target import toolchain
    from freezer.runtime.devices import host_fingerprint

    host, made = host_fingerprint(), toolchain()
    classes = ", ".join(f"`{name}`" for name in detect({}).classes)
    return [
        (
            f"- Machine: {host['cpu']}, {host['affinity']} of {host['num_cpus']} CPUs, Linux"
            f" {host['kernel']}, classes {classes}"
        ),
        f"- Versions: torch {made['torch']}, oneDNN {made['onednn']}, "
        + ", ".join(f"{name} {version(name)}" for name in ("transformers", "ray", "mlflow"))
        + f", Python {made['python']}, {made['cxx']}",
        *(f"- {name}={value}" for name, value in host["environment"].items()),
    ]
