"""`coldpress status [CAMPAIGN]`: progress of a campaign, or a list of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from freezer.cli import JsonOption, StoreOption, exiting, note, say, say_json
from freezer.errors import INFRASTRUCTURE, ColdpressError, UsageError
from freezer.store import Store
from pipeline.records import iso
from pipeline.reporting import Status, campaign_status, campaigns_in_words, in_words

if TYPE_CHECKING:
    from pipeline.cluster import Job

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@exiting(refused=INFRASTRUCTURE)
def main(
    campaign: Annotated[
        str | None,
        typer.Argument(help="Name of the campaign. Default: list all campaigns of the store."),
    ] = None,
    store: StoreOption = "./store",
    address: Annotated[
        str | None, typer.Option(help="Dashboard of the head, http://HEAD:8265, to show the job.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the progress of a campaign, whether it is running, has ended, or its driver died."""
    if campaign is None:
        if as_json or address is not None:
            raise UsageError(
                "--json and --address need the name of a campaign; without options, all campaigns"
                " are listed"
            )
        for line in campaigns_in_words(Store.open(store), note):
            say(line)
        return
    status: Status | None = None
    problem: ColdpressError | None = None
    try:
        status = campaign_status(Store.open(store), campaign, note)
    except ColdpressError as error:
        if address is None:
            raise
        problem = error  # a job may wait for nodes, or die, before it records anything
    if status is not None and not as_json:  # first: the head may be lost
        for line in in_words(status, store):
            say(line)
    job = None if address is None else _newest_job(campaign, store, address)
    if problem is not None and job is None:
        raise problem
    if as_json:
        record = {"campaign": campaign, "status": None} if status is None else status.to_json()
        say_json({**record, "job": job.to_json() if job else None}, indent=1)
        return
    if problem is not None:
        say(f"campaign {campaign}: {problem}")
    if address is not None:
        _print_job(job, address)


def _newest_job(campaign: str, store: str, address: str) -> Job | None:
    """Return the newest job of a campaign on the cluster, or None."""
    from pipeline.cluster import Jobs, job_prefix  # imports ray

    jobs = Jobs(address).find(job_prefix(campaign, store))
    return jobs[-1] if jobs else None


def _print_job(job: Job | None, address: str) -> None:
    if job is None:
        say(f"the cluster at {address} has no submitted job of this campaign and store")
        return
    times = ""
    if job.started:
        times += f", started {iso(job.started)}"
    if job.ended:
        times += f", ended {iso(job.ended)}"
    say(f"job {job.id}: {job.status}{times}; {job.message}")


if __name__ == "__main__":
    app()
