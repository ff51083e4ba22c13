"""`python -m jobs.submit CATALOG --address http://HEAD:8265 ...`: jobs.optimize as a job of a
cluster. See docs/run-a-fleet.md.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from freezer.errors import InfrastructureError, UsageError
from jobs import optimize
from jobs.exits import exiting
from pipeline.catalog import is_registry
from pipeline.cluster import PACKAGES, Job, Jobs, Upload, check_absolute, gather, job_prefix, stage
from pipeline.exit_codes import INTERRUPTED, OK
from pipeline.ledger import check_campaign
from pipeline.sources import named_files

OPTIMIZE = "python -m jobs.optimize"

STAGED = "coldpress-job-"
"""Prefix of the temporary folders with uploads."""

NUM_LISTED = 20
"""Number of files listed after a submission; --dry-run lists all."""

_REFUSED: Any = typer.BadParameter.__bases__[0]
"""Typer's error for invalid options; newer releases bundle their own click."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def main(
    context: typer.Context,
    address: Annotated[str, typer.Option(help="Dashboard of the head: http://HEAD:8265.")],
    detach: Annotated[bool, typer.Option("--detach", help="Submit, but do not follow.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files to upload, and submit nothing.")
    ] = False,
    include: Annotated[
        list[str] | None,
        typer.Option(help="A further file or folder below the current one to upload. Repeatable."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(help="NAME or NAME=VALUE for the job, visible in the dashboard. Repeatable."),
    ] = None,
    ca: Annotated[
        str | None, typer.Option(help="Certificates to verify an https:// address.")
    ] = None,
    python: Annotated[str, typer.Option(help="Python interpreter on the head.")] = "python",
) -> None:
    """Run a campaign as a job of a Ray cluster.

    All other arguments are those of `python -m jobs.optimize`, including CATALOG.
    """
    out, errors = Console(soft_wrap=True, highlight=False, markup=False), Console(stderr=True)
    with exiting(errors, interrupted="interrupted before the job was submitted"):
        request = Submission(
            arguments=context.args,
            address=address,
            detach=detach,
            dry_run=dry_run,
            include=include or [],
            environ=_environ(env or []),
            ca=ca,
            python=python,
        )
        sys.exit(_submit(request, out))


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """The options of a submission; `arguments` are those of jobs.optimize."""

    arguments: list[str]
    address: str
    detach: bool
    dry_run: bool
    include: list[str]
    environ: dict[str, str]
    ca: str | None
    python: str


def _submit(request: Submission, out: Console) -> int:
    """Submit a job or attach to the running one, and follow it; return the exit code."""
    options = checked_options(request.arguments)
    campaign = options["campaign"] or optimize.campaign_name(options["catalog"])
    check_campaign(campaign)
    given = None if is_registry(options["catalog"]) else options["catalog"]
    named = named_files(Path(given)) if given is not None and Path(given).is_file() else ()
    upload = gather(given, request.include, Path.cwd(), named=named)
    words = [
        upload.catalog if word == given and upload.catalog is not None else word
        for word in request.arguments
    ]
    if options["campaign"] is None:
        words += ["--campaign", campaign]
    entrypoint = f"exec {shlex.join([request.python, '-m', 'jobs.optimize', *words])}"
    if request.dry_run:
        out.print(f"would submit {_described(upload)}")
        _list_files(upload, out, limit=None)
        return OK
    jobs = Jobs(request.address, ca=request.ca)
    try:
        with tempfile.TemporaryDirectory(prefix=STAGED) as folder:
            stage(upload.files, Path(folder))
            prefix = job_prefix(campaign, options["store"])
            job, submitted = jobs.submit(
                prefix, entrypoint, working_dir=Path(folder), environ=request.environ
            )
    except (
        OSError
    ) as error:  # of this machine's disks; errors of the cluster are ColdpressErrors already
        raise _upload_error(error) from error
    if submitted:
        out.print(f"submitted {job.id}: {_described(upload)}")
        _list_files(upload, out, limit=NUM_LISTED)
    else:
        out.print(
            f"campaign {campaign} is running already as {job.id}; attached to it, nothing was"
            " submitted"
        )
        if job.entrypoint != entrypoint:
            out.print(f"it was submitted with other options: {job.entrypoint}")
    status = shlex.join(
        [
            "python",
            "-m",
            "jobs.status",
            campaign,
            "--store",
            options["store"],
            "--address",
            request.address,
        ]
    )
    if request.detach:
        out.print(f"detached; {status}")
        return OK
    return _follow(jobs, job, out, status)


def _described(upload: Upload) -> str:
    return f"{len(upload.files)} files, {upload.size_bytes / 1e6:.1f} MB"


def _list_files(upload: Upload, out: Console, *, limit: int | None) -> None:
    """Print the names of the uploaded files besides Coldpress's own, and of those left out; at most
    `limit` of each.
    """
    own = [name for name in upload.files if name.partition("/")[0] not in PACKAGES]
    lines = [f"  {name} ({upload.files[name].stat().st_size / 1e3:.1f} kB)" for name in own]
    out.print(f"  {', '.join(PACKAGES)} ({len(upload.files) - len(own)} files)")
    for found in (
        lines,
        [f"  not sent: {name} ({reason})" for name, reason in upload.left_out.items()],
    ):
        for line in found[:limit]:
            out.print(line)
        if limit is not None and len(found) > limit:
            out.print(f"  and {len(found) - limit} more; --dry-run lists all")


def _upload_error(error: OSError) -> UsageError | InfrastructureError:
    """Return the error for files that cannot be staged in a temporary folder, or packed by Ray in
    another.
    """
    file = re.sub(
        rf"^.*/{STAGED}[^/]*/?", "", str(error.filename or "")
    )  # a staged file's name in the working directory
    if file and isinstance(error, PermissionError | FileNotFoundError):
        return UsageError(
            f"{file} cannot be uploaded ({error.strerror}); make it readable, or remove it from the"
            " catalog's folder and --include"
        )
    return InfrastructureError(
        f"the upload cannot be packed in the temporary folder {tempfile.gettempdir()} ({error}); make"
        " room there, or set TMPDIR to another folder",
        code="CP-TEMPORARY",
    )


def checked_options(arguments: list[str]) -> dict[str, Any]:
    """Parse the options of jobs.optimize, to reject here what it would reject on the cluster.

    Raises:
        UsageError: an option is unknown or invalid, or a location is relative.
    """
    command = typer.main.get_command(optimize.app)
    try:
        options = command.make_context(OPTIMIZE, list(arguments)).params
    except typer.Exit:  # after --help
        sys.exit(0)
    except _REFUSED as error:
        raise UsageError(
            f"{error.format_message()} See `python -m jobs.optimize --help`."
        ) from error
    if options["address"] is not None:
        raise UsageError("--address was given twice")
    optimize.check_options(options)
    check_absolute(optimize.locations(options["store"], options["tracking_uri"], options["json"]))
    return options


def _environ(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise UsageError(f"--env {name}: this variable is not set here; use --env {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def _follow(jobs: Jobs, job: Job, out: Console, status: str) -> int:
    """Print a job's log until it ends or the user leaves; return the exit code."""
    written = 0

    def write(text: str) -> None:
        nonlocal written
        sys.stdout.write(text)
        sys.stdout.flush()
        written += len(text)

    while True:
        try:
            ended = jobs.follow(job.id, write, skip=written)
        except KeyboardInterrupt:
            answer = _ask(job)
            if answer == "stop":
                jobs.stop(job.id)
                out.print(f"stopping job {job.id}; finished work is kept")
            elif answer == "leave":
                out.print(f"job {job.id} keeps running; {status}")
                return INTERRUPTED
            continue
        if ended.status != "SUCCEEDED":
            out.print(
                f"job {job.id}:"
                f" {ended.status.lower()}{': ' + ended.message if ended.exit_code not in (1, 2, 3) else ''}"
            )
        return ended.verdict


def _ask(job: Job) -> Literal["stop", "follow", "leave"]:
    """Ask what to do after Ctrl-C; without a terminal, or after another Ctrl-C, leave the job
    running.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "leave"
    sys.stderr.write(
        f"\nstop job {job.id} too? [y: stop it, n: keep following, Ctrl-C again: leave it running] "
    )
    sys.stderr.flush()
    try:
        return "stop" if input().strip().lower() in ("y", "yes") else "follow"
    except (KeyboardInterrupt, EOFError):
        sys.stderr.write("\n")
        return "leave"


if __name__ == "__main__":
    app()
