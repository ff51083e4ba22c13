"""MLflow servers for tests and a PostgreSQL for them: processes on the loopback address that can be
killed and started again.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil
import pytest
import requests

from tests.support.raylets import DIES_WITH_US, LOOPBACK, free_port, wait_until

POSTGRES_USER = "nobody" if os.geteuid() == 0 else None
"""The user that runs PostgreSQL, which refuses to run as root; None means the current one."""

SETTINGS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}

ALLOWED_HOSTS = f"{LOOPBACK},{LOOPBACK}:*"


def server_options(backend: str, artifacts: str, *, num_workers: int = 1) -> list[str]:
    """Options of a server without authentication.

    Args:
        backend: URI of its database.
        artifacts: URI or folder where it stores artifacts.
        num_workers: number of its processes that answer requests.
    """
    places = ["--backend-store-uri", backend, "--artifacts-destination", artifacts]
    return [*places, "--allowed-hosts", ALLOWED_HOSTS, "--workers", str(num_workers)]


class MlflowServer:
    """An MLflow server that keeps its address; it passes on the artifacts of its clients. Use it as
    a context manager.

    Args:
        options: of `mlflow server`, except its address.
        folder: its working directory, with its log.
        environment: variables for it alone.
        python: interpreter with its version of MLflow.

    Attributes:
        uri: its address.
    """

    def __init__(
        self,
        options: Sequence[str],
        folder: Path,
        *,
        environment: Mapping[str, str] = SETTINGS,
        python: str = sys.executable,
    ) -> None:
        port = free_port()
        self.uri = f"http://{LOOPBACK}:{port}"
        self._folder = folder
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MLFLOW_", "PYTEST_"))
        }
        self._environment = {**inherited, **environment}
        self._command = [
            *DIES_WITH_US,
            python,
            "-m",
            "mlflow",
            "server",
            "--host",
            LOOPBACK,
            "--port",
            str(port),
            *options,
        ]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with (self._folder / "mlflow.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, cwd=self._folder, stdout=log, stderr=log
            )
        wait_until(self._answers, "the server answers", 180)

    def processes(self) -> list[psutil.Process]:
        """It and its workers."""
        return _tree(self._process)

    def kill(self) -> None:
        """Kill it and its workers."""
        if self._process.poll() is None:
            for process in reversed(self.processes()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait(30)

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self._folder / "mlflow.log").read_text()
        try:
            return requests.get(f"{self.uri}/health", timeout=2).ok
        except requests.ConnectionError:
            return False


class Postgres:
    """A PostgreSQL of its own, in a temporary folder. Use it as a context manager; a test is
    skipped if it is not installed.

    Its user `coldpress` needs no password.
    """

    def __init__(self) -> None:
        self.port = free_port()

    def __enter__(self) -> Self:
        found = shutil.which("initdb") or next(
            (str(path) for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")), None
        )
        if found is None:
            pytest.skip(
                "PostgreSQL's initdb is missing: install it (Debian: apt-get install postgresql)"
            )
        self._programs = Path(found).resolve().parent
        self._folder = Path(tempfile.mkdtemp(prefix="coldpress-postgres-"))
        if POSTGRES_USER is not None:
            os.chown(self._folder, pwd.getpwnam(POSTGRES_USER).pw_uid, -1)
        self._run(
            "initdb", "--pgdata", "data", "--username", "coldpress", "--auth", "trust", "--no-sync"
        )
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = [
            f"listen_addresses={LOOPBACK}",
            f"port={self.port}",
            f"unix_socket_directories={self._folder}",
        ]
        command = [
            *DIES_WITH_US,
            str(self._programs / "postgres"),
            "-D",
            "data",
            *(f"--{setting}" for setting in settings),
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self._folder, user=POSTGRES_USER, stdout=log, stderr=log
            )
        wait_until(
            lambda: self._run("pg_isready", *self._client, check=False).returncode == 0,
            "PostgreSQL answers",
        )

    def kill(self) -> None:
        """End it without a checkpoint, as if its machine had died; what was committed stays."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)

    def processes(self) -> list[psutil.Process]:
        """Its processes: one for each connection, and others."""
        return _tree(self._process)

    def database(self, name: str) -> str:
        """Return the URI of a new database."""
        self._run("createdb", *self._client, "--username", "coldpress", name)
        return f"postgresql+psycopg2://coldpress@{LOOPBACK}:{self.port}/{name}"

    def drop(self, name: str) -> None:
        """Remove a database."""
        self._run("dropdb", "--force", *self._client, "--username", "coldpress", name)

    @property
    def _client(self) -> list[str]:
        return ["--host", str(self._folder), "--port", str(self.port)]

    def _run(
        self, program: str, *arguments: str, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        command = [str(self._programs / program), *arguments]
        return subprocess.run(
            command,
            cwd=self._folder,
            user=POSTGRES_USER,
            capture_output=True,
            text=True,
            check=check,
        )


def _tree(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    top = psutil.Process(process.pid)
    return [top, *top.children(recursive=True)]
