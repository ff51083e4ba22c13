"""The command `coldpress doctor`: check a machine."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Annotated

import typer
from rich.text import Text

from freezer.cli.arguments import REFUSED, console, say, table
from freezer.codec import encode

STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


def doctor(
    store: Annotated[str | None, typer.Option("--store", help="Also check this store: a path or URI.")] = None,
    tracking_uri: Annotated[str | None, typer.Option(help="Also check this MLflow server or database.")] = None,
    address: Annotated[str | None, typer.Option(help="Also check this Ray cluster. Default: RAY_ADDRESS.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine, and name a remedy for each problem; exit code 1 if there are errors."""
    from freezer.checks.checks import run_checks
    from freezer.checks.findings import CheckRequest

    findings = list(run_checks(CheckRequest(store=store, tracking_uri=tracking_uri, address=address)))
    num = Counter(finding.level for finding in findings)
    if as_json:
        found = {"num_errors": num["error"], "num_warnings": num["warning"], "findings": [encode(finding) for finding in findings]}
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        rows = table()
        rows.add_column(no_wrap=True)
        rows.add_column(no_wrap=True)
        rows.add_column(overflow="fold")
        for finding in findings:
            rows.add_row(Text(finding.level, STYLES[finding.level]), finding.check, Text(finding.text))
            if finding.remedy:
                rows.add_row("", "", Text(f"remedy: {finding.remedy}"))
        console.print(rows, highlight=False)
        say(
            ", ".join(
                f"{count} {level}{'' if count == 1 else 's'}"
                for level, count in (("error", num["error"]), ("warning", num["warning"]))
            )
        )
    if num["error"]:
        sys.exit(REFUSED)
