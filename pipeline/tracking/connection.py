"""Connection to MLflow: the tracking URI, a client that fails fast, and a single error class for
all failures.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from freezer.checks import CheckRequest, Finding
from freezer.errors import (
    ColdpressError,
    InfrastructureError,
    MissingDependencyError,
    UsageError,
    first_line,
    without_credentials,
)
from freezer.files import move

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.store.entities import PagedList

T = TypeVar("T")

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Give up on a dead server after 10 seconds; MLflow's defaults take 4 minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    # Keep MLflow's messages about migrations and copies off the live display.
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Defaults for MLflow's settings; variables that are set win."""

PROBE_S = 5
"""Time limit of the first response."""

REMEDY = (
    "start the server (`mlflow server`), fix the database or its disk, or set another"
    " --tracking-uri"
)

REFUSED = {
    "UNAUTHENTICATED": (
        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to those of a user of the server"
    ),
    "PERMISSION_DENIED": (
        "let the server's administrator give this user the permission, or add this host name to"
        " --allowed-hosts"
    ),
}
"""Remedies by MLflow's error code: HTTP 401 and 403."""

MISSING = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""MLflow's error codes for models and versions that do not exist."""

MODELS = "models:/"
"""Scheme of the URIs of registered models and of logged models."""

SQLITE = "sqlite:///"
DATABASE = "mlflow.db"
"""File name of the databases that a campaign makes."""

DEFAULT_URI = f"{SQLITE}{DATABASE}"

_MAKE = (
    "import sys; from mlflow import MlflowClient; MlflowClient(sys.argv[1],"
    " sys.argv[1]).search_experiments(max_results=1)"
)
"""Program that lets MLflow create the database of a URI."""


def preload() -> None:
    """Import MLflow with our settings, which takes 1.8 seconds.

    Raises:
        ModuleNotFoundError: mlflow is not installed.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow  # noqa: F401


def default_tracking_uri() -> str:
    """The URI that MLflow's own variable sets, or the database of the working directory."""
    return os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def check_database(tracking_uri: str, *, create: bool) -> None:
    """Check that a sqlite database exists, or may be created: a file `mlflow.db` in a folder that
    exists. Any other is more likely a mistake.

    Args:
        tracking_uri: URI of MLflow.
        create: whether a database may be created.

    Raises:
        UsageError: it does not exist, or the URI is invalid.
    """
    path = database_file(resolve(tracking_uri))
    if path is None or path.exists():
        return
    if not create or path.name != DATABASE or not path.parent.is_dir():
        raise UsageError(
            f"tracking URI {tracking_uri!r}: the database {path} does not exist; correct the URI."
            f" Campaigns create a database only if it is named {DATABASE}, in a folder that exists"
        )


def connect(tracking_uri: str, *, create: bool = False) -> MlflowClient:
    """Return a client of a tracking server or database.

    Args:
        tracking_uri: URI from `resolve`: `sqlite:///FILE`, `http://HOST:PORT`, or another that
            MLflow supports.
        create: create the sqlite database if it does not exist; see `check_database`.

    Raises:
        UsageError: the sqlite database does not exist.
        InfrastructureError: nothing answers there.
        MissingDependencyError: mlflow is not installed.
    """
    try:
        preload()
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"tracking needs mlflow ({error}); in the checkout: pip install --group pipeline"
        ) from error
    from mlflow import MlflowClient

    check_database(tracking_uri, create=create)
    registry_uri = os.environ.get("MLFLOW_REGISTRY_URI") or tracking_uri
    with reaching(tracking_uri):
        path = database_file(tracking_uri)
        if path is not None:
            _ensure_database(path)
        _probe(tracking_uri)
        client = MlflowClient(tracking_uri=tracking_uri, registry_uri=registry_uri)
        client.search_experiments(max_results=1)
        return client


@contextmanager
def connected(tracking_uri: str) -> Iterator[MlflowClient]:
    """Connect to a server or an existing database; errors are those of `resolve`, `connect` and
    `reaching`.
    """
    address = resolve(tracking_uri)
    client = connect(address)
    with reaching(address):
        yield client


def resolve(tracking_uri: str) -> str:
    """Make a relative sqlite path of a URI absolute.

    Raises:
        UsageError: the URI names a folder; MLflow 3 no longer writes to folders.
    """
    scheme, separator, _ = tracking_uri.partition(":")
    if not separator or scheme == "file":
        raise UsageError(
            f"tracking URI {tracking_uri!r} is a folder, which MLflow no longer tracks to; "
            "expected sqlite:///mlflow.db or http://HOST:5000"
        )
    path = database_file(tracking_uri)
    if path is None:
        return tracking_uri
    _, question_mark, query = tracking_uri.partition("?")
    return f"{SQLITE}{path}{question_mark}{query}"


def database_file(tracking_uri: str) -> Path | None:
    """Return the absolute path of a sqlite database; None for any other URI."""
    if not tracking_uri.startswith(SQLITE):
        return None
    return Path(tracking_uri.removeprefix(SQLITE).partition("?")[0]).absolute()


@contextmanager
def reaching(tracking_uri: str) -> Iterator[None]:
    """Convert every exception to InfrastructureError; SQLAlchemy, requests, boto and MLflow share
    no base class.
    """
    try:
        yield
    except ColdpressError:
        raise
    except Exception as error:
        remedy = REFUSED.get(getattr(error, "error_code", ""), REMEDY)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = (
                "make room where MLflow keeps its artifacts, and in the temporary folder"
                f" {tempfile.gettempdir()}"
            )
        raise InfrastructureError(
            f"MLflow at {tracking_uri} failed: {type(error).__name__}: {first_line(error)};"
            f" {remedy}",
            code="CP-TRACKING",
        ) from error


def upload(client: MlflowClient, artifact_uri: str, folder: Path) -> None:
    """Upload all files of a folder to a run's or logged model's `artifact_uri`.

    The client's own methods fetch that first.
    """
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    get_artifact_repository(artifact_uri, tracking_uri=client.tracking_uri).log_artifacts(
        str(folder)
    )


def all_pages(search: Callable[[str | None], PagedList[T]]) -> list[T]:
    """Return everything that a search finds.

    Args:
        search: returns the page after a token; None begins.
    """
    items = []
    token: str | None = None
    while True:
        page = search(token)
        items += page
        token = page.token
        if not token:
            return items


def named(name: str) -> str:
    """Return the condition of an MLflow filter for a model or its versions. `=` could not express a
    name with both kinds of quotes.
    """
    return f"name IN ({name!r})"


def _probe(tracking_uri: str) -> None:
    """Fail fast if nothing answers; MLflow itself retries for minutes."""
    path = database_file(tracking_uri)
    if path is not None:
        with closing(sqlite3.connect(path, timeout=PROBE_S)) as database:
            database.execute("BEGIN IMMEDIATE")  # fails if the file is read-only or locked
            database.rollback()
    elif tracking_uri.startswith(("http:", "https:")):
        from mlflow.utils.credentials import get_default_host_creds
        from mlflow.utils.rest_utils import http_request

        # Any response is enough: the first real call reports the error of an unhealthy server.
        http_request(
            get_default_host_creds(tracking_uri),
            "/health",
            "GET",
            max_retries=0,
            timeout=PROBE_S,
            raise_on_status=False,
        )


def _ensure_database(path: Path) -> None:
    """Create a sqlite database unless it exists; processes of this machine wait for each other."""
    # Lock the folder: closing a second handle of the file would release sqlite's own locks in this
    # process.
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if not path.exists() or path.stat().st_size == 0:
            _make_database(path)
    finally:
        os.close(handle)


def _make_database(path: Path) -> None:
    """Create a sqlite database in a temporary folder and move it; MLflow cannot use one whose
    creation was killed.

    Raises:
        OSError, RuntimeError: it cannot be created.
    """
    with tempfile.TemporaryDirectory(
        dir=path.parent,
        prefix=f".{path.name}.",
    ) as folder:
        made = Path(folder, path.name)
        # In another process, so that this one does not have the file open when it is moved.
        done = subprocess.run(
            [sys.executable, "-c", _MAKE, f"{SQLITE}{made}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
        move(made, path)


def check_mlflow(request: CheckRequest) -> Iterator[Finding]:
    """The installed MLflow, and the server or database at the requested URI; a database that does
    not exist is not made.
    """
    text = f"MLflow {version('mlflow')}"
    if request.tracking_uri is None:
        yield Finding(
            check="MLflow",
            text=f"{text} (--tracking-uri checks a server or database)",
        )
        return
    text += f", {without_credentials(request.tracking_uri)}"
    try:
        uri = resolve(request.tracking_uri)
        path = database_file(uri)
        if path is not None and not path.exists():
            check_database(uri, create=True)
            text += ": does not exist; the first campaign makes it"
        else:
            connect(uri)
            text += " answers"
    except ColdpressError as error:
        yield Finding(
            check="MLflow",
            level="error",
            text=error.coded,
            remedy=REMEDY,
        )
    else:
        yield Finding(check="MLflow", text=text)
