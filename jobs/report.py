"""`coldpress report CAMPAIGN`, or `python -m jobs.report CAMPAIGN`: a campaign as one HTML file.

See docs/run-a-fleet.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from freezer.errors import InfrastructureError
from freezer.files import check_file, write_whole
from freezer.store import Store
from jobs.exits import exiting, say

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    campaign: Annotated[str, typer.Argument(help="Name of the campaign.")],
    store: Annotated[
        str, typer.Option(help="Store of the campaign: a folder, s3:// or gs://.")
    ] = "./store",
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
    against: Annotated[
        str | None, typer.Option(help="An earlier campaign to compare with.")
    ] = None,
) -> None:
    """Write the report of a campaign: one HTML file that needs no network."""
    console, errors = Console(), Console(stderr=True)
    with exiting(errors):
        from pipeline.reporting import report_page  # imports jinja2

        check_file(out, "--out")
        page = report_page(Store.open(store), campaign, against=against)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_whole(out, page)
        except OSError as error:
            raise InfrastructureError(f"--out {out} cannot be written: {error}") from error
    say(console, f"wrote {out} ({len(page) / 1e3:.0f} kB)", "")


if __name__ == "__main__":
    app()
