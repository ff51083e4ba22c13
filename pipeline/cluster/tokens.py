"""Tokens of Ray: check that a cluster accepts this process.

A local Ray writes a token into its user's home. `ray start --head` then demands it, but drivers and
other nodes send it only with RAY_AUTH_MODE=token. On a mismatch Ray fails after 20 seconds, without
the reason.
"""

from __future__ import annotations

import contextlib
import os

from ray.exceptions import AuthenticationError

from freezer.errors import InfrastructureError

CODE = "CP-RAY-TOKEN"


def check_token(address: str) -> None:
    """Connect to the head at `HOST:PORT`, which is known to answer.

    Raises:
        InfrastructureError: the head rejects the token of this process, or demands one.
    """
    try:
        with contextlib.suppress(
            ImportError, AttributeError, RuntimeError
        ):  # internal; other errors are left to ray.init
            from ray._private.authentication.authentication_token_setup import (
                ensure_token_if_auth_enabled,
            )
            from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled

            ensure_token_if_auth_enabled(
                create_token_if_missing=False
            )  # without a token, Ray's C++ code aborts the process
            GcsClient(address=address)
    except AuthenticationError as error:
        raise token_rejected(address, error) from error


def token_rejected(address: str, error: AuthenticationError) -> InfrastructureError:
    """Return the error for a cluster that rejects the token of this process, or demands one."""
    why = error.message.splitlines()[0].rstrip(".")
    mode = os.environ.get("RAY_AUTH_MODE", "not set")
    return InfrastructureError(
        f"Ray at {address} rejects the token ({why}; RAY_AUTH_MODE is {mode} here); set"
        " RAY_AUTH_MODE=token here, and copy ~/.ray/auth_token from the head to this machine (or"
        " set RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN)",
        code=CODE,
    )
