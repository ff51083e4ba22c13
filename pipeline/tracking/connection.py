"""Reaching MLflow: the tracking URI, a client that fails fast, and one error for whatever goes wrong behind it."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.errors import ColdpressError, InfrastructureError, MissingDependencyError, UsageError, first_line
from freezer.files.atomic import move
from pipeline.workspace.staging import temporary_place

if TYPE_CHECKING:
    from mlflow import MlflowClient

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # A server that dies during a campaign is given up after some 10 seconds, where MLflow's own defaults take 4 minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    # MLflow tells on the terminal how it migrates a new database and copies files; a live display is no place for that.
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Defaults for MLflow's own settings; a variable that is set already wins."""

PROBE_S = 5
"""How long the first sign of life may take."""

SQLITE = "sqlite:///"

_PARTIAL = ".partial"
_MAKE = "import sys; from mlflow import MlflowClient; MlflowClient(sys.argv[1], sys.argv[1]).search_experiments(max_results=1)"
"""A program that has MLflow make the database of a URI."""


def preload() -> None:
    """Import MLflow, with our settings: 1.8 seconds, which `connect` need not take then.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow  # noqa: F401


def connect(tracking_uri: str) -> MlflowClient:
    """A client of a tracking server or database that answers now; a database is made if it does not exist.

    Args:
        tracking_uri: `sqlite:///FILE`, `http://HOST:PORT`, or what else MLflow tracks to; from `resolve`.

    Raises:
        InfrastructureError: nothing answers there.
        MissingDependencyError: mlflow is not installed.
    """
    try:
        preload()
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"tracking needs mlflow ({error}); pip install 'coldpress[pipeline]'") from error
    from mlflow import MlflowClient

    with reaching(tracking_uri), _initialized_once(tracking_uri):
        path = database_file(tracking_uri)
        if path is not None and (not path.exists() or path.stat().st_size == 0):
            _make_database(path)
        _probe(tracking_uri)
        client = MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)
        client.search_experiments(max_results=1)
        return client


def resolve(tracking_uri: str) -> str:
    """The URI with a relative sqlite path made absolute, so that it means the same in every working directory.

    Raises:
        UsageError: the URI names a folder of files, which MLflow 3 does not write any more.
    """
    scheme, separator, _ = tracking_uri.partition(":")
    if not separator or scheme == "file":
        raise UsageError(
            f"tracking URI {tracking_uri!r} is a folder, which MLflow no longer tracks to; "
            "name sqlite:///mlflow.db or http://HOST:5000"
        )
    path = database_file(tracking_uri)
    if path is None:
        return tracking_uri
    _, question_mark, query = tracking_uri.partition("?")
    return f"{SQLITE}{path}{question_mark}{query}"


def database_file(tracking_uri: str) -> Path | None:
    """The absolute path of a sqlite database; None for any other URI."""
    if not tracking_uri.startswith(SQLITE):
        return None
    return Path(tracking_uri.removeprefix(SQLITE).partition("?")[0]).absolute()


@contextmanager
def reaching(tracking_uri: str) -> Iterator[None]:
    """Turn whatever is raised inside into InfrastructureError: SQLAlchemy, requests, boto and MLflow share no base class."""
    try:
        yield
    except ColdpressError:
        raise
    except Exception as error:
        remedy = "start the server (`mlflow server`), mend the database or its disk, or name another --tracking-uri"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # of files; a database says it otherwise
            remedy = f"make room where MLflow keeps its artifacts, and in the temporary folder {temporary_place()}"
        message = f"MLflow at {tracking_uri} failed: {type(error).__name__}: {first_line(error)}; {remedy}"
        raise InfrastructureError(without_password(message), code="CP-TRACKING") from error


def listed(names: Sequence[str]) -> str:
    """A list for `IN` in a filter of MLflow's, which reads it as Python does; nowhere else does it understand every quote."""
    return f"({', '.join(map(repr, names))})"


def without_password(text: str) -> str:
    """A text with `***` in place of the passwords of the URLs in it."""
    return re.sub(r"(://[^:/@\s]*):[^/@\s]*@", r"\1:***@", text)


def _probe(tracking_uri: str) -> None:
    """Fail at once where nothing answers: MLflow itself retries for minutes, for a database too."""
    path = database_file(tracking_uri)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(path, timeout=PROBE_S)
        with closing(database):
            database.execute("BEGIN IMMEDIATE")  # takes the write lock: a read-only or locked file shows here
            database.rollback()
    elif tracking_uri.startswith(("http:", "https:")):
        from mlflow.utils.credentials import get_default_host_creds
        from mlflow.utils.rest_utils import http_request

        # Any answer will do: an unhealthy or refusing server says why at the first real call.
        http_request(get_default_host_creds(tracking_uri), "/health", "GET", max_retries=0, timeout=PROBE_S, raise_on_status=False)
    elif tracking_uri.startswith(("postgresql", "mysql")):
        import sqlalchemy

        engine = sqlalchemy.create_engine(tracking_uri, connect_args={"connect_timeout": PROBE_S})
        try:
            engine.connect().close()
        finally:
            engine.dispose()


def _make_database(path: Path) -> None:
    """Make a sqlite database, whole or not at all: MLflow cannot go on with one whose making was killed.

    Raises:
        OSError, RuntimeError: it cannot be made.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{_PARTIAL}*"):  # of processes that were killed: this one has the lock
        left.unlink(missing_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}{_PARTIAL}")
    try:
        # In a process of its own: nothing may hold the file open when it gets its name.
        done = subprocess.run([sys.executable, "-c", _MAKE, f"{SQLITE}{partial}"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        move(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _initialized_once(tracking_uri: str) -> Iterator[None]:
    """Keep other processes of this machine from making the same sqlite database at the same time, which breaks it."""
    path = database_file(tracking_uri)
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # The folder is locked, not the file: closing a second handle of the file would drop sqlite's own locks in this process.
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks, where one driver at a time is the rule anyway
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
