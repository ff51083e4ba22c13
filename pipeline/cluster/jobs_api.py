"""Submission: a campaign as a job of a Ray cluster, through Ray's job API. Besides ray_cluster.py the only file that imports ray.

submit    one job at a time for each campaign of a store: a second submission attaches to the one that runs
follow    its log as it is written, until it ends; a connection that breaks is made again
verdict   the exit code of jobs.optimize itself
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from freezer.errors import InfrastructureError, UsageError
from freezer.store.uri import one_spelling
from pipeline.exit_codes import FAILED, INFRASTRUCTURE, INTERRUPTED, OK, USAGE

STOP_WAIT_S = 60
"""What a job has to end by itself when it is stopped: what is finished goes into the ledger, and MLflow is told."""

RETRIES = 5
"""Of a broken connection, before a follower gives up."""

CONNECT_S = 20.0
"""What the dashboard has to take a connection, and each piece of what is sent."""

ANSWER_S = 60.0
"""What it has to answer a request; it waits for an agent itself, for 10 s."""

SILENT_S = 60.0
"""Without a word in a log, until its connection is made again: that to a machine that has vanished says nothing for ever. Twice as
long each time, up to SILENT_MOST_S: Ray's head goes on serving a connection that was left until the job says something."""

SILENT_MOST_S = 300.0

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job of the cluster.

    Attributes:
        id: its submission id.
        status: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED.
        message: what Ray says of it.
        exit_code: of its driver; None while it runs, or where nothing ran.
        started, ended: seconds since the epoch, by the head's clock; None where not yet.
        entrypoint: its command.
    """

    id: str
    status: str
    message: str
    exit_code: int | None
    started: float | None
    ended: float | None
    entrypoint: str

    @property
    def has_ended(self) -> bool:
        """Whether it is over."""
        return self.status in ENDED

    @property
    def verdict(self) -> int:
        """The exit code of jobs.optimize; 3 where its driver died, or never started."""
        if self.status == "STOPPED":
            return INTERRUPTED
        code = OK if self.status == "SUCCEEDED" else self.exit_code
        return code if code in (OK, FAILED, USAGE, INFRASTRUCTURE, INTERRUPTED) else INFRASTRUCTURE

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        fields = ("id", "status", "message", "exit_code", "started", "ended")
        return {name: getattr(self, name) for name in fields}


def job_prefix(campaign: str, store: str) -> str:
    """The beginning of the ids of a campaign's jobs: the campaign's name, and a few digits of its store, however that is spelled.

    Raises:
        UsageError: the store's URI is none.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "-", campaign)
    return f"coldpress-{name}-{hashlib.sha256(f'{campaign}|{one_spelling(store)}'.encode()).hexdigest()[:6]}-"


class Jobs:
    """The jobs of a cluster.

    Args:
        address: of its dashboard, `http://HEAD:8265`.
        ca: a file with the certificate authority of an `https://` address; None means the system's.

    Raises:
        UsageError: the address is none of a dashboard.
        InfrastructureError: it does not answer, or takes no token of ours.
    """

    def __init__(self, address: str, *, ca: str | None = None) -> None:
        if not re.match(r"https?://[^/]+", address):
            raise UsageError(f"--address {address!r}: expected that of the head's dashboard, like http://HEAD:8265")
        if ca is not None and not Path(ca).exists():
            raise UsageError(f"--ca {ca!r} is not there; name a file with certificates")
        self.address = address
        for name in ("dashboard_sdk", "job.sdk"):
            logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.ERROR)
        for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):  # Ray would take them instead of what it is told
            os.environ.pop(name, None)
        with self._told():
            self._client = _Client(address, verify=ca if ca is not None else True)

    def find(self, prefix: str) -> list[Job]:
        """The jobs of a campaign, the newest last.

        Raises:
            InfrastructureError: the cluster does not answer.
        """
        with self._told():
            found = [_job(details) for details in self._client.list_jobs() if (details.submission_id or "").startswith(prefix)]
        return sorted((job for job in found if job.id[len(prefix) :].isdigit()), key=lambda job: int(job.id[len(prefix) :]))

    def info(self, job_id: str) -> Job:
        """One job.

        Raises:
            InfrastructureError: the cluster does not answer, or knows no such job.
        """
        with self._told():
            return _job(self._client.get_job_info(job_id))

    def submit(self, prefix: str, entrypoint: str, *, working_dir: Path, environ: Mapping[str, str]) -> tuple[Job, bool]:
        """The running job of a campaign, and whether this call has submitted it.

        Args:
            prefix: of `job_prefix`.
            entrypoint: the command.
            working_dir: a folder that travels.
            environ: variables for the driver and its workers.

        Raises:
            InfrastructureError: the cluster does not answer, or does not take the job.
        """
        while True:
            known = self.find(prefix)
            if known and not known[-1].has_ended:
                return known[-1], False
            job_id = f"{prefix}{int(known[-1].id[len(prefix) :]) + 1 if known else 1}"
            runtime_env = {
                "working_dir": str(working_dir),
                "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **environ},
            }
            try:
                with self._told():
                    self._client.submit_job(entrypoint=entrypoint, submission_id=job_id, runtime_env=runtime_env)
            except InfrastructureError:
                if job_id not in [job.id for job in self.find(prefix)]:
                    raise
                continue  # another submission was faster, and has the id
            return self.info(job_id), True

    def stop(self, job_id: str) -> None:
        """Tell a job to end; it has STOP_WAIT_S to do so by itself.

        Raises:
            InfrastructureError: the cluster does not answer.
        """
        with self._told():
            self._client.stop_job(job_id)

    def follow(self, job_id: str, write: Callable[[str], None], *, skip: int = 0) -> Job:
        """The job at its end; meanwhile `write` is given its log as it grows. A log that is silent is asked for again.

        Args:
            job_id: which.
            write: takes a piece of the log.
            skip: characters of the log that were written before.

        Raises:
            InfrastructureError: the cluster does not answer any more; the message says that the job may go on.
        """
        seen, failures, silent_s = skip, 0, SILENT_S

        def write_and_count(text: str) -> None:  # a connection that breaks raises: what it has brought until then is shown
            nonlocal seen
            write(text)
            seen += len(text)

        while True:
            try:
                before, shown, whole = self.info(job_id), seen, True
                if before.status != "PENDING":
                    with self._told():
                        whole = asyncio.run(self._tail(job_id, write_and_count, seen, silent_s))
                job = self.info(job_id)
                failures = 0
            except InfrastructureError as error:
                failures += 1
                if failures > RETRIES or error.code == TOKEN:
                    raise InfrastructureError(
                        f"{error}; job {job_id} may be going on: submit it again to follow it, or see `python -m jobs.status`",
                        code=error.code,
                    ) from error
                time.sleep(min(2.0**failures, 10.0))
                continue
            if job.has_ended and (whole or before.has_ended):  # one that has ended meanwhile may have said more
                return job
            silent_s = SILENT_S if whole or seen > shown else min(2 * silent_s, SILENT_MOST_S)
            time.sleep(0.5)

    async def _tail(self, job_id: str, write: Callable[[str], None], seen: int, silent_s: float) -> bool:
        """Write what follows the first `seen` characters of a log; whether it came to its end, and did not just fall silent."""
        position = 0
        async with contextlib.aclosing(self._client.tail_job_logs(job_id)) as pieces:
            while True:
                try:
                    piece = await asyncio.wait_for(anext(pieces, None), silent_s)
                except TimeoutError:
                    return False
                if piece is None:
                    return True
                fresh = piece[max(0, seen - position) :]
                position += len(piece)
                if fresh:
                    write(fresh)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Make one sentence of whatever goes wrong with the cluster."""
        import aiohttp

        try:
            yield
        except AuthenticationError as error:
            lines = str(error).strip().splitlines() or ["authentication failed"]
            raise InfrastructureError(
                f"Ray at {self.address} does not take this token ({lines[0]}); set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH to those of the cluster",
                code=TOKEN,
            ) from error
        except requests.exceptions.SSLError as error:
            raise InfrastructureError(
                f"the certificate of {self.address} cannot be verified; name its authority with --ca FILE", code="CP-RAY"
            ) from error
        except (ConnectionError, requests.RequestException, aiohttp.ClientError, TimeoutError) as error:
            raise InfrastructureError(
                f"Ray's dashboard at {self.address} does not answer ({type(error).__name__}); check --address, and that the head "
                "was started with its dashboard (ray[default], --include-dashboard=true)",
                code="CP-RAY",
            ) from error
        except (RuntimeError, ValueError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise InfrastructureError(f"Ray at {self.address} refuses: {_last_sentence(lines)}", code="CP-RAY") from error


class _Client(JobSubmissionClient):  # type: ignore[misc]  # ray has no types
    """Ray's client, which itself waits for ever for a dashboard that takes a connection and does not answer."""

    def _do_request(
        self, method: str, endpoint: str, *, data: bytes | None = None, json_data: dict[str, Any] | None = None
    ) -> requests.Response:
        body = None if data is None else io.BytesIO(data)  # sent in pieces: a limit is on each, and not on the whole
        response: requests.Response = super()._do_request(
            method, endpoint, data=body, json_data=json_data, timeout=(CONNECT_S, ANSWER_S)
        )
        return response


TOKEN = "CP-RAY-TOKEN"


def _last_sentence(lines: list[str]) -> str:
    """What a server said, of an answer that may end in a traceback of its own."""
    text = lines[0] if "Traceback" not in lines[0] else lines[-1]
    return text.strip().rstrip('"')[:300]


def _job(details: Any) -> Job:
    return Job(
        id=str(details.submission_id),
        status=str(getattr(details.status, "value", details.status)),
        message=str(details.message or ""),
        exit_code=details.driver_exit_code,
        started=details.start_time / 1000 if details.start_time else None,
        ended=details.end_time / 1000 if details.end_time else None,
        entrypoint=str(details.entrypoint),
    )
