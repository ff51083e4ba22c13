"""`coldpress report CAMPAIGN`: a campaign as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from freezer.cli import StoreOption, exiting, say
from freezer.errors import INFRASTRUCTURE, InfrastructureError
from freezer.files import check_file, write_whole
from freezer.store import Store

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@exiting(refused=INFRASTRUCTURE)
def main(
    campaign: Annotated[str, typer.Argument(help="Name of the campaign.")],
    store: StoreOption = "./store",
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
    against: Annotated[
        str | None, typer.Option(help="An earlier campaign to compare with.")
    ] = None,
) -> None:
    """Write the report of a campaign: one HTML file that needs no network."""
    from pipeline.reporting import report_page  # imports jinja2

    check_file(out, "--out")
    page = report_page(Store.open(store), campaign, against=against)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, page)
    except OSError as error:
        raise InfrastructureError(f"--out {out} cannot be written: {error}") from error
    say(f"wrote {out} ({len(page) / 1e3:.0f} kB)")


if __name__ == "__main__":
    app()
