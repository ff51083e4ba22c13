"""`python -m jobs.submit CATALOG --address http://HEAD:8265 ...`: jobs.optimize as a job of a cluster. See docs/run-a-fleet.md."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from freezer.errors import InfrastructureError, UsageError
from freezer.freezing.recipes.recipes import select
from freezer.hardware.device_classes import DEVICE_CLASSES
from jobs import optimize
from jobs.exits import exiting
from pipeline.catalog.catalog import is_registry
from pipeline.cluster.jobs_api import Job, Jobs, job_prefix
from pipeline.cluster.working_dir import gather, stage
from pipeline.exit_codes import INTERRUPTED, OK
from pipeline.ledger.lease import check_campaign
from pipeline.workspace.staging import temporary_place

OPTIMIZE = "python -m jobs.optimize"

STAGED = "coldpress-job-"
"""How the names of temporary folders with what travels begin."""

_REFUSED: Any = typer.BadParameter.__bases__[0]
"""What typer raises of options that are wrong; newer releases have a click of their own."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def main(
    context: typer.Context,
    address: Annotated[str, typer.Option(help="Of the head's dashboard: http://HEAD:8265.")],
    detach: Annotated[bool, typer.Option("--detach", help="Submit, and do not follow.")] = False,
    include: Annotated[
        list[str] | None, typer.Option(help="A further file or folder, below this one, that travels to the cluster. Repeatable.")
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="NAME or NAME=VALUE for the job; the dashboard shows it. Repeatable.")
    ] = None,
    ca: Annotated[str | None, typer.Option(help="Certificates that an https:// address is verified by.")] = None,
    python: Annotated[str, typer.Option(help="The interpreter to run on the head.")] = "python",
) -> None:
    """Run a campaign as a job of a Ray cluster. All other arguments are those of `python -m jobs.optimize`, CATALOG among them."""
    out, errors = Console(soft_wrap=True, highlight=False, markup=False), Console(stderr=True)
    with exiting(errors, interrupted="interrupted before the job was submitted"):
        sys.exit(_submit(context.args, address, detach, include or [], _environ(env or []), ca, python, out))


def _submit(
    arguments: list[str],
    address: str,
    detach: bool,
    include: list[str],
    environ: dict[str, str],
    ca: str | None,
    python: str,
    out: Console,
) -> int:
    """Submit or attach, and follow; the exit code."""
    options = checked_options(arguments)
    campaign = options["campaign"] or optimize.campaign_name(options["catalog"])
    check_campaign(campaign)
    registry = is_registry(options["catalog"])
    files, catalog = gather(None if registry else options["catalog"], include, Path.cwd())
    jobs = Jobs(address, ca=ca)
    entrypoint = _entrypoint(python, arguments, options["catalog"], catalog, campaign)
    try:
        with tempfile.TemporaryDirectory(prefix=STAGED) as folder:
            stage(files, Path(folder))
            prefix = job_prefix(campaign, options["store"])
            job, submitted = jobs.submit(prefix, entrypoint, working_dir=Path(folder), environ=environ)
    except OSError as error:  # of this machine's disks: those of the cluster are errors of ours already
        raise _not_packed(error) from error
    if submitted:
        out.print(f"submitted {job.id}: {len(files)} files, {sum(file.size_bytes for file in files) / 1e6:.1f} MB")
    else:
        out.print(f"campaign {campaign} is running already as {job.id}; attached to it, nothing was submitted")
        if job.entrypoint != entrypoint:
            out.print(f"it was submitted with other options: {job.entrypoint}")
    status = shlex.join(["python", "-m", "jobs.status", campaign, "--store", options["store"], "--address", address])
    if detach:
        out.print(f"detached; {status}")
        return OK
    return _follow(jobs, job, out, status)


def _not_packed(error: OSError) -> UsageError | InfrastructureError:
    """What keeps the files from being put into a temporary folder, or packed by Ray, which does so in another."""
    file = re.sub(rf"^.*/{STAGED}[^/]*/?", "", str(error.filename or ""))  # of one that is staged, as it is called here
    if file and isinstance(error, PermissionError | FileNotFoundError):
        return UsageError(
            f"{file} is to travel to the cluster, and cannot be read ({error.strerror}); make it readable, or take it out of the "
            "catalog's folder and of --include"
        )
    return InfrastructureError(
        f"what travels to the cluster cannot be packed in the temporary folder {temporary_place()} ({error}); make room there, or "
        "name another with TMPDIR",
        code="CP-TEMPORARY",
    )


def checked_options(arguments: list[str]) -> dict[str, Any]:
    """The options of jobs.optimize as it will read them on the cluster, refused here where it would refuse them there.

    Raises:
        UsageError: an option is unknown or wrong, or names a place that the cluster does not have.
    """
    command = typer.main.get_command(optimize.app)
    try:
        options = command.make_context(OPTIMIZE, list(arguments)).params
    except typer.Exit:  # --help, which has been printed
        sys.exit(0)
    except _REFUSED as error:
        raise UsageError(f"{error.format_message()} See `python -m jobs.optimize --help`.") from error
    if options["address"] is not None:
        raise UsageError("--address was given twice")
    select(options["recipe"] or (), portable=False)
    unknown = set(options["device_class"] or ()) - {*DEVICE_CLASSES, "auto"}
    if unknown:
        raise UsageError(f"--device-class {', '.join(sorted(unknown))}: expected one of {', '.join(('auto', *DEVICE_CLASSES))}")
    optimize.check_job_locations(options["store"], options["tracking_uri"], options["json"])
    return options


def _entrypoint(python: str, arguments: list[str], catalog: str, within: str | None, campaign: str) -> str:
    """The command of the job; the catalog under the path that it has in the working directory."""
    words = [within if word == catalog and within is not None else word for word in arguments]
    if not any(word == "--campaign" or word.startswith("--campaign=") for word in words):
        words += ["--campaign", campaign]
    return f"exec {shlex.join([python, '-m', 'jobs.optimize', *words])}"


def _environ(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise UsageError(f"--env {name}: no such variable is set here; write --env {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def _follow(jobs: Jobs, job: Job, out: Console, status: str) -> int:
    """Show a job's log until it ends or is left; the exit code."""
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
                out.print(f"stopping job {job.id}; it keeps what is finished")
            elif answer == "leave":
                out.print(f"job {job.id} goes on; {status}")
                return INTERRUPTED
            continue
        if ended.status != "SUCCEEDED":
            out.print(f"job {job.id}: {ended.status.lower()}{': ' + ended.message if ended.exit_code not in (1, 2, 3) else ''}")
        return ended.verdict


def _ask(job: Job) -> Literal["stop", "follow", "leave"]:
    """What a person who pressed Ctrl-C wants; without a terminal, or pressed again, the job is left to itself."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "leave"
    sys.stderr.write(f"\nstop job {job.id} too? [y: stop it, n: go on following, Ctrl-C again: leave it running] ")
    sys.stderr.flush()
    try:
        return "stop" if input().strip().lower() in ("y", "yes") else "follow"
    except (KeyboardInterrupt, EOFError):
        sys.stderr.write("\n")
        return "leave"


if __name__ == "__main__":
    app()
