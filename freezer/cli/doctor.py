"""The command `coldpress doctor`: check a machine."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Annotated

import typer
from rich.text import Text

from freezer.checks.findings import CheckRequest, Finding
from freezer.cli.arguments import REFUSED, console, say, table
from freezer.codec import encode

_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}

CHECK_WIDTH = 16
"""Of the longest name, `temporary folder`."""


def doctor(
    store: Annotated[
        str | None, typer.Option("--store", help="Also check this store: a path or URI.")
    ] = None,
    tracking_uri: Annotated[
        str | None, typer.Option(help="Also check this MLflow server or database.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Also check this Ray cluster. Default: RAY_ADDRESS.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine, and name a remedy for each problem; exit code 1 if there are errors."""
    from freezer.checks.run_checks import run_checks

    num: Counter[str] = Counter()
    findings = []
    for finding in run_checks(
        CheckRequest(store=store, tracking_uri=tracking_uri, address=address)
    ):
        num[finding.level] += 1
        if as_json:
            findings.append(encode(finding))
        else:
            _print(finding)
    if as_json:
        sys.stdout.write(
            json.dumps(
                {"num_errors": num["error"], "num_warnings": num["warning"], "findings": findings}
            )
            + "\n"
        )
    else:
        say(
            ", ".join(
                f"{num[level]} {level}{'' if num[level] == 1 else 's'}"
                for level in ("error", "warning")
            )
        )
    if num["error"]:
        sys.exit(REFUSED)


def _print(finding: Finding) -> None:
    """Print a finding, with its remedy unwrapped, so that it can be copied."""
    row = table()
    row.add_column(width=max(map(len, _STYLES)))
    row.add_column(width=CHECK_WIDTH)
    row.add_column(overflow="fold")
    row.add_row(Text(finding.level, _STYLES[finding.level]), finding.check, Text(finding.text))
    console.print(row, highlight=False)
    if finding.remedy:
        say(f"         remedy: {finding.remedy}")
