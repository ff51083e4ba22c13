"""The command `coldpress doctor`: check a machine."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Annotated

import typer
from rich.text import Text

from freezer.checks import CheckRequest, Finding, run_checks
from freezer.cli.arguments import JsonOption, console, say, say_json, table
from freezer.codec import encode
from freezer.errors import ColdpressError

_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}

CHECK_WIDTH = 16
"""Length of the longest name, `temporary folder`."""


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
    as_json: JsonOption = False,
) -> None:
    """Check this machine, and name a remedy for each problem; exit code 1 if there are errors."""
    findings = []
    request = CheckRequest(store=store, tracking_uri=tracking_uri, address=address)
    for finding in run_checks(request):
        findings.append(finding)
        if not as_json:
            _print(finding)
    counts = Counter(finding.level for finding in findings)
    if as_json:
        say_json(
            {
                "num_errors": counts["error"],
                "num_warnings": counts["warning"],
                "findings": [encode(finding) for finding in findings],
            }
        )
    else:
        say(f"errors: {counts['error']}, warnings: {counts['warning']}")
    if counts["error"]:
        sys.exit(ColdpressError.exit_code)


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
