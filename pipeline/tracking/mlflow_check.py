"""MLflow as `coldpress doctor` finds it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from freezer.checks import CheckRequest, Finding
from freezer.errors import ColdpressError
from freezer.files import check_file
from pipeline.tracking.connection import connect, database_file, resolve, without_password


def check_mlflow(request: CheckRequest) -> Iterator[Finding]:
    """The installed MLflow, and the server or database at the requested URI; a database that does
    not exist is not made.
    """
    if request.tracking_uri is None:
        yield Finding(
            check="MLflow",
            text=f"MLflow {version('mlflow')} (--tracking-uri checks a server or database)",
        )
        return
    text = f"MLflow {version('mlflow')}, {without_password(request.tracking_uri)}"
    try:
        path = database_file(resolve(request.tracking_uri))
        if path is not None and not path.exists():
            check_file(path, "--tracking-uri")
            yield Finding(
                check="MLflow", text=f"{text}: does not exist; the first campaign makes it"
            )
            return
        connect(resolve(request.tracking_uri))
    except ColdpressError as error:
        yield Finding(
            check="MLflow", level="error", text=error.coded, remedy=_remedy(request.tracking_uri)
        )
        return
    yield Finding(check="MLflow", text=f"{text} answers")


def _remedy(tracking_uri: str) -> str:
    if tracking_uri.startswith(("http:", "https:")):
        server = without_password(tracking_uri).rstrip("/")
        return (
            f"curl -i {server}/health   # if nothing answers: mlflow server --host HOST --port 5000"
        )
    path = database_file(tracking_uri)
    if path is not None:
        return (
            f"ls -ld {path} {path.parent}; df -h {path.parent}   # grant write access, free space,"
            " or name another database"
        )
    return "coldpress doctor --tracking-uri sqlite:///mlflow.db   # or http://HOST:5000"
