"""Locations that a job names: they must mean the same on whichever machine its driver runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlparse

from freezer.errors import UsageError

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable that Ray gives to the driver of a submitted job."""


def in_job() -> bool:
    """Whether this process is the driver of a job that was submitted to a cluster."""
    return JOB_CONFIG in os.environ


def check_absolute(locations: Mapping[str, str]) -> None:
    """Refuse what a job would write into its temporary folder on the cluster, where it is lost.

    Args:
        locations: by option, a path or URI.

    Raises:
        UsageError: one is relative; the message names it and what to write.
    """
    for option, location in locations.items():
        if is_relative(location):
            raise UsageError(
                f"{option} {location!r} is relative: a job runs in a temporary folder of the cluster, which goes with it; name "
                + (
                    "a server, or sqlite:////PATH/mlflow.db"
                    if option == "--tracking-uri"
                    else "an absolute path that all nodes reach"
                )
            )


def is_relative(location: str) -> bool:
    """Whether a path or URI means a place that depends on the working directory."""
    scheme, colon, rest = location.partition(":")
    if not colon or "/" in scheme:
        return not location.startswith("/")
    if scheme.startswith("sqlite"):
        return not rest.removeprefix("///").startswith("/")
    return scheme == "file" and not urlparse(location).path.startswith("/")
