"""`python -m jobs.status CAMPAIGN`: where a campaign stands. See docs/run-a-fleet.md."""

from __future__ import annotations

import json as json_text
import sys
from typing import Annotated

import typer
from rich.console import Console

from freezer.store import Store
from jobs.exits import exiting, say
from pipeline.status import campaign_status, in_words, iso

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    campaign: Annotated[str, typer.Argument(help="Its name.")],
    store: Annotated[str, typer.Option(help="That the campaign publishes to: a folder, s3:// or gs://.")] = "./store",
    address: Annotated[str | None, typer.Option(help="Of the head's dashboard, http://HEAD:8265, to see its job too.")] = None,
    ca: Annotated[str | None, typer.Option(help="Certificates that an https:// address is verified by.")] = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say where a campaign stands: from the ledger, while it runs, when it has ended, and when its driver died."""
    out, errors = Console(soft_wrap=True, highlight=False, markup=False), Console(stderr=True)
    with exiting(errors):
        status = campaign_status(Store.open(store), campaign, tell=lambda text: say(errors, text, "dim"))
        job = None
        if address is not None:
            from pipeline.submission import Jobs, job_prefix  # imports ray

            known = Jobs(address, ca=ca).find(job_prefix(campaign, store))
            job = known[-1] if known else None
    if json:
        sys.stdout.write(json_text.dumps({**status.to_json(), "job": job.to_json() if job else None}, indent=1) + "\n")
        return
    for line in in_words(status, store):
        out.print(line)
    if job is not None:
        ended = f", ended {iso(job.ended)}" if job.ended else ""
        out.print(f"job {job.id}: {job.status}, started {iso(job.started)}{ended}; {job.message}")
    elif address is not None:
        out.print(f"the cluster at {address} has no job of this campaign that `python -m jobs.submit` has submitted to this store")


if __name__ == "__main__":
    app()
