"""Campaigns as jobs of a Ray cluster, through Ray's job API: submit one, and follow its log.

A campaign of a store has one job at a time: a second submission attaches to the running one.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from freezer.codec import frozen
from freezer.errors import (
    FAILED,
    INFRASTRUCTURE,
    INTERRUPTED,
    OK,
    USAGE,
    InfrastructureError,
    UsageError,
)
from freezer.store import one_spelling
from pipeline.cluster.client import token_rejected

STOP_WAIT_S = 60
"""Time for a stopped job to end by itself: it writes the ledger and MLflow."""

RETRIES = 5
"""Attempts to restore a broken connection."""

CONNECT_S = 20.0
"""Time limit of a connection to the dashboard, and of each piece of an upload."""

ANSWER_S = 60.0
"""Time limit of a response; the dashboard itself waits 10 s for an agent."""

POLL_S = 2.0
"""Interval between two requests for the log of a job.

Each returns the whole log: 100 bytes or so for each line.
"""

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


@frozen
class Job:
    """A job of the cluster.

    Attributes:
        id: submission id.
        status: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED.
        message: Ray's message.
        exit_code: exit code of the driver, or None.
    """

    id: str
    status: str
    message: str
    exit_code: int | None

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended."""
        return self.status in ENDED

    @property
    def verdict(self) -> int:
        """Exit code of `coldpress optimize`; 3 if the driver died or never started."""
        if self.status == "STOPPED":
            return INTERRUPTED
        code = OK if self.status == "SUCCEEDED" else self.exit_code
        return code if code in (OK, FAILED, USAGE, INFRASTRUCTURE, INTERRUPTED) else INFRASTRUCTURE


def job_prefix(campaign: str, store: str) -> str:
    """Return the prefix of a campaign's job ids: its name, and a digest that is the same for every
    spelling of the store.

    Raises:
        UsageError: the store's URI is invalid.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "-", campaign)
    digest = hashlib.sha256(f"{campaign}|{one_spelling(store)}".encode()).hexdigest()
    return f"coldpress-{name}-{digest[:6]}-"


class Jobs:
    """The jobs of a cluster.

    Args:
        address: address of its dashboard, `http://HEAD:8265`.

    Raises:
        UsageError: the address is invalid.
        InfrastructureError: the dashboard does not answer, or rejects the token.
    """

    def __init__(self, address: str) -> None:
        if not re.match(r"https?://[^/]+", address):
            raise UsageError(
                f"--address {address!r}: expected the head's dashboard, like http://HEAD:8265"
            )
        self.address = address
        for name in ("dashboard", "_private.runtime_env"):
            logging.getLogger(f"ray.{name}").setLevel(logging.ERROR)
        for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):  # Ray would prefer them
            os.environ.pop(name, None)
        with self._errors():
            self._client = _Client(address, verify=True)

    def find(self, prefix: str) -> list[Job]:
        """Return the jobs of a campaign, the newest last.

        Raises:
            InfrastructureError: the cluster does not answer.
        """
        with self._errors():
            ours = [
                _job(details)
                for details in self._client.list_jobs()
                if (details.submission_id or "").startswith(prefix)
            ]
        numbered = [job for job in ours if job.id[len(prefix) :].isdigit()]
        return sorted(numbered, key=lambda job: int(job.id[len(prefix) :]))

    def info(self, job_id: str) -> Job:
        """Return one job.

        Raises:
            InfrastructureError: the cluster does not answer, or has no such job.
        """
        with self._errors():
            return _job(self._client.get_job_info(job_id))

    def submit(
        self,
        prefix: str,
        entrypoint: str,
        *,
        working_dir: Path,
        environ: Mapping[str, str],
    ) -> tuple[Job, bool]:
        """Submit a job, or find the campaign's running one; return it, and whether it was
        submitted.

        Args:
            prefix: prefix of `job_prefix`.
            entrypoint: command.
            working_dir: folder to upload.
            environ: variables of the driver and its workers.

        Raises:
            InfrastructureError: the cluster does not answer, or rejects the job.
        """
        known = self.find(prefix)
        if known and not known[-1].has_ended:
            return known[-1], False
        job_id = f"{prefix}{int(known[-1].id[len(prefix) :]) + 1 if known else 1}"
        environ = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **environ}
        runtime_env = {"working_dir": str(working_dir), "env_vars": environ}
        with self._errors():
            self._client.submit_job(
                entrypoint=entrypoint,
                submission_id=job_id,
                runtime_env=runtime_env,
            )
        return self.info(job_id), True

    def follow(self, job_id: str, write: Callable[[str], None]) -> Job:
        """Write a job's log as it grows, until the job ends; return the job.

        Args:
            job_id: id of the job.
            write: writes a piece of the log.

        Raises:
            InfrastructureError: the cluster no longer answers; the job may still be running.
        """
        failures = num_written = 0
        while True:
            try:
                job = self.info(job_id)  # before the log, which is whole if the job has ended
                with self._errors():
                    log = "" if job.status == "PENDING" else self._client.get_job_logs(job_id)
            except InfrastructureError as error:
                failures += 1
                if failures > RETRIES:
                    raise InfrastructureError(
                        f"{error}; job {job_id} may still be running: submit it again to follow it,"
                        " or see `coldpress status`",
                        code=error.code,
                    ) from error
                time.sleep(2 * failures)
                continue
            failures = 0
            write(log[num_written:])
            num_written = max(num_written, len(log))
            if job.has_ended:
                return job
            time.sleep(POLL_S)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert errors of the cluster to InfrastructureError."""
        try:
            yield
        except AuthenticationError as error:
            raise token_rejected(self.address, error) from error
        except (ConnectionError, requests.RequestException) as error:
            raise InfrastructureError(
                f"Ray's dashboard at {self.address} does not answer ({type(error).__name__}); check"
                " --address, and that the head was started with its dashboard (ray[default]) and,"
                " to accept jobs from other machines, with --dashboard-host=0.0.0.0 or its own"
                " address: by default only the head itself reaches the dashboard",
                code="CP-RAY",
            ) from error
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1]  # it may be a traceback
            raise InfrastructureError(
                f"Ray at {self.address} rejects the request: {reason}", code="CP-RAY"
            ) from error


class _Client(JobSubmissionClient):  # type: ignore[misc]  # ray has no types
    """Ray's client with time limits: it waits forever for a dashboard that accepts a connection and
    does not answer.
    """

    def _do_request(
        self,
        method: str,
        endpoint: str,
        *,
        data: bytes | None = None,
        json_data: dict[str, object] | None = None,
    ) -> requests.Response:
        # sent in pieces, so the limit applies to each
        body = None if data is None else io.BytesIO(data)
        response: requests.Response = super()._do_request(
            method,
            endpoint,
            data=body,
            json_data=json_data,
            timeout=(CONNECT_S, ANSWER_S),
        )
        return response


def _job(details: Any) -> Job:
    return Job(
        id=str(details.submission_id),
        status=str(details.status),
        message=str(details.message or ""),
        exit_code=details.driver_exit_code,
    )
