"""`python -m jobs.status [CAMPAIGN]`: progress of a campaign, or a list of all.

See docs/run-a-fleet.md.
"""

from __future__ import annotations

import json as json_text
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from freezer.errors import UsageError
from freezer.store import Store
from jobs.exits import exiting, say
from pipeline.records import iso
from pipeline.reporting import campaign_status, campaigns_in_words, in_words, status_if_known

if TYPE_CHECKING:
    from pipeline.cluster import Job

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    campaign: Annotated[
        str | None,
        typer.Argument(help="Name of the campaign. Default: list all campaigns of the store."),
    ] = None,
    store: Annotated[
        str, typer.Option(help="Store of the campaign: a folder, s3:// or gs://.")
    ] = "./store",
    address: Annotated[
        str | None, typer.Option(help="Dashboard of the head, http://HEAD:8265, to show the job.")
    ] = None,
    ca: Annotated[
        str | None, typer.Option(help="Certificates to verify an https:// address.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the progress of a campaign, whether it is running, has ended, or its driver died."""
    out, errors = Console(soft_wrap=True, highlight=False, markup=False), Console(stderr=True)

    def note(text: str) -> None:
        say(errors, text, "dim")

    with exiting(errors):
        if campaign is None:
            if json or address is not None:
                raise UsageError(
                    "--json and --address need the name of a campaign; without options, all"
                    " campaigns are listed"
                )
            for line in campaigns_in_words(Store.open(store), note):
                out.print(line)
            return
        # A job may wait for nodes, or die, before it records anything.
        status = (
            campaign_status(Store.open(store), campaign, note)
            if address is None
            else status_if_known(store, campaign, note)
        )
        if status is not None and not json:  # first: the head may be lost
            for line in in_words(status, store):
                out.print(line)
        job = None if address is None else _newest_job(campaign, store, address, ca)
        if status is None and job is None:
            status = campaign_status(Store.open(store), campaign, note)  # raises
    if json:
        found = {"campaign": campaign, "status": None} if status is None else status.to_json()
        sys.stdout.write(
            json_text.dumps({**found, "job": job.to_json() if job else None}, indent=1) + "\n"
        )
        return
    if status is None:
        out.print(
            f"campaign {campaign}: the store {store}, as this machine sees it, has no record of"
            " it yet"
        )
    if job is not None:
        times = "".join(
            f", {word} {iso(time)}"
            for word, time in (("started", job.started), ("ended", job.ended))
            if time
        )
        out.print(f"job {job.id}: {job.status}{times}; {job.message}")
    elif address is not None:
        out.print(
            f"the cluster at {address} has no job of this campaign and store that `python -m"
            " jobs.submit` submitted"
        )


def _newest_job(campaign: str, store: str, address: str, ca: str | None) -> Job | None:
    """Return the newest job of a campaign on the cluster, or None."""
    from pipeline.cluster import Jobs, job_prefix  # imports ray

    known = Jobs(address, ca=ca).find(job_prefix(campaign, store))
    return known[-1] if known else None


if __name__ == "__main__":
    app()
