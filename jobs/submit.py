"""`coldpress submit CATALOG --address http://HEAD:8265 ...`: a campaign as a job of a cluster.

See docs/guides/run-a-fleet.md.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from freezer.cli import command_app, exiting, say
from freezer.errors import INFRASTRUCTURE, INTERRUPTED, InfrastructureError, UsageError
from jobs import optimize

if TYPE_CHECKING:
    from pipeline.cluster import Job, Jobs, Upload

_REFUSED: Any = typer.BadParameter.__bases__[0]
"""Typer's error for invalid options; newer releases bundle their own click."""

ADDRESSES = ["RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"]
"""Variables of `ray job submit`."""

app = command_app()


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@exiting(refused=INFRASTRUCTURE, interrupted="interrupted before the job was submitted")
def main(
    context: typer.Context,
    address: Annotated[
        str,
        Option(envvar=ADDRESSES, help="Dashboard of the head: http://HEAD:8265."),
    ],
    detach: Annotated[bool, Option("--detach", help="Submit, but do not follow.")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="List the files to upload, and submit nothing.")
    ] = False,
    include: Annotated[
        list[str] | None,
        Option(help="A further file or folder below the current one to upload. Repeatable."),
    ] = None,
    env: Annotated[
        list[str] | None,
        Option(help="NAME or NAME=VALUE for the job, visible in the dashboard. Repeatable."),
    ] = None,
    python: Annotated[str, Option(help="Python interpreter on the head.")] = "python",
) -> None:
    """Run a campaign as a job of a Ray cluster.

    All other arguments are those of `coldpress optimize`, including CATALOG.
    """
    from pipeline.cluster import Jobs, job_prefix

    options = checked_options(context.args)
    environ = _environ(env or [])
    upload = _gathered(options["catalog"], include or [])
    if dry_run:
        _list_files("would submit", upload)
        return
    config = optimize.checked_config(options)
    # The job does not have the variables of this process; an option given twice is the last one.
    arguments = ["--tracking-uri", config.tracking_uri, *context.args]
    if upload.catalog is not None:
        arguments[arguments.index(options["catalog"])] = upload.catalog
    if options["campaign"] is None:
        arguments += ["--campaign", config.campaign]
    entrypoint = f"exec {shlex.join([python, '-m', 'jobs.optimize', *arguments])}"
    jobs = Jobs(address)
    job = _submitted(
        jobs, job_prefix(config.campaign, options["store"]), entrypoint, upload, environ
    )
    status = shlex.join(["coldpress", "status", config.campaign, "--store", options["store"]])
    if detach:
        say(f"detached; {status}")
    else:
        sys.exit(_follow(jobs, job, status))


def _gathered(catalog: str, include: list[str]) -> Upload:
    """The files to upload: of Coldpress, those that the catalog names, and further ones."""
    from pipeline.catalog import is_registry
    from pipeline.cluster import gather
    from pipeline.sources import named_files

    path = Path(catalog)
    named = named_files(path) if path.is_file() else ()
    file = None if is_registry(catalog) else catalog
    return gather(file, include, Path.cwd(), named=named)


def _submitted(
    jobs: Jobs,
    prefix: str,
    entrypoint: str,
    upload: Upload,
    environ: dict[str, str],
) -> Job:
    """Submit a job, or return the running one of the same campaign."""
    from pipeline.cluster import stage

    try:
        with tempfile.TemporaryDirectory(prefix="coldpress-job-") as folder:
            stage(upload.files, Path(folder))
            job, is_new = jobs.submit(
                prefix,
                entrypoint,
                working_dir=Path(folder),
                environ=environ,
            )
    except OSError as error:  # of this machine's disks; those of the cluster are converted
        raise InfrastructureError(
            f"the upload cannot be packed in a temporary folder: {error}; make the files readable,"
            " make room there, or set TMPDIR to another folder",
            code="CP-TEMPORARY",
        ) from error
    if is_new:
        _list_files(f"submitted {job.id}:", upload)
    else:
        say(f"the campaign is running already as {job.id}; attached to it, nothing was submitted")
    return job


def _list_files(verb: str, upload: Upload) -> None:
    """Print what is uploaded: the number and size of all files, the names of those besides
    Coldpress's own, and of those left out.
    """
    from pipeline.cluster import PACKAGES

    say(f"{verb} {len(upload.files)} files, {upload.size_bytes / 1e6:.1f} MB")
    for name, path in upload.files.items():
        if name.partition("/")[0] not in PACKAGES:
            say(f"  {name} ({path.stat().st_size / 1e3:.1f} kB)")
    for name in upload.left_out:
        say(f"  not sent: {name} (outside of the catalog's folder and the current one)")


def checked_options(arguments: list[str]) -> dict[str, Any]:
    """Parse the options of `coldpress optimize`, to reject here what it rejects on the cluster.

    Raises:
        UsageError: an option is unknown or invalid, or a location is relative.
    """
    command = typer.main.get_command(optimize.app)
    try:
        options = command.make_context("coldpress optimize", list(arguments)).params
    except typer.Exit:  # after --help
        sys.exit(0)
    except _REFUSED as error:
        raise UsageError(f"{error.format_message()} See `coldpress optimize --help`.") from error
    optimize.check_locations(optimize.checked_config(options), options["json"])
    return options


def _environ(variables: list[str]) -> dict[str, str]:
    environ = {}
    for text in variables:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise UsageError(f"--env {name}: this variable is not set here; use --env {name}=VALUE")
        environ[name] = value if equals else os.environ[name]
    return environ


def _follow(jobs: Jobs, job: Job, status: str) -> int:
    """Print a job's log until it ends or the user leaves; return the exit code."""
    try:
        ended = jobs.follow(job.id, partial(print, end="", flush=True))
    except KeyboardInterrupt:
        say(f"job {job.id} keeps running; {status}")
        say(f"to stop it: ray job stop {job.id} --address {jobs.address}")
        return INTERRUPTED
    if ended.status != "SUCCEEDED":
        say(f"job {job.id}: {ended.status.lower()}: {ended.message}")
    return ended.verdict


if __name__ == "__main__":
    app()
