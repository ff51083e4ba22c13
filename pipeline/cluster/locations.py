"""Locations in a job's options, which must mean the same on every machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlparse

from freezer.errors import UsageError

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray sets for the driver of a submitted job."""


def in_job() -> bool:
    """Whether this process is the driver of a submitted job."""
    return JOB_CONFIG in os.environ


def check_absolute(locations: Mapping[str, str]) -> None:
    """Reject relative locations: a job's output would be lost with its temporary folder.

    Args:
        locations: paths or URIs by option.

    Raises:
        UsageError: a location is relative.
    """
    for option, location in locations.items():
        if is_relative(location):
            database = option == "--tracking-uri"
            expected = "a server, or sqlite:////PATH/mlflow.db" if database else "an absolute path that all nodes reach"
            raise UsageError(
                f"{option} {location!r} is relative, but a job runs in a temporary folder of the cluster, deleted with it; "
                f"expected {expected}"
            )


def is_relative(location: str) -> bool:
    """Whether a path or URI depends on the working directory."""
    scheme, colon, rest = location.partition(":")
    if not colon or "/" in scheme:
        return not location.startswith("/")
    if scheme.startswith("sqlite"):
        return not rest.removeprefix("///").startswith("/")
    return scheme == "file" and not urlparse(location).path.startswith("/")
