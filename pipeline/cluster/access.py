"""Access to a cluster: check that its head accepts the token of this process, before Ray does.

A local Ray writes a token into its user's home. `ray start --head` then demands it, but drivers and
other nodes send it only with RAY_AUTH_MODE=token. On a mismatch Ray fails after 20 seconds, without
the reason.
"""

from __future__ import annotations

import contextlib
import os

from ray.exceptions import AuthenticationError

from freezer.errors import InfrastructureError

TOKEN_CODE = "CP-RAY-TOKEN"


def check_token(address: str) -> None:
    """Connect to the head at `HOST:PORT`, which is known to answer.

    Raises:
        InfrastructureError: the head rejects the token of this process, or demands one.
    """
    # Ray's internal API; errors other than this one are left to ray.init.
    with contextlib.suppress(ImportError, AttributeError, RuntimeError):
        from ray._private.authentication.authentication_token_setup import (
            ensure_token_if_auth_enabled,
        )
        from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled

        try:
            # Without a token, Ray's C++ code would abort the process.
            ensure_token_if_auth_enabled(create_token_if_missing=False)
            GcsClient(address=address)
        except AuthenticationError as error:
            raise token_rejected(address, error) from error


def token_rejected(address: str, error: AuthenticationError) -> InfrastructureError:
    """Return the error for a cluster that rejects the token of this process, or demands one."""
    reason = error.message.splitlines()[0].rstrip(".")
    mode = os.environ.get("RAY_AUTH_MODE", "not set")
    return InfrastructureError(
        f"Ray at {address} rejects the token ({reason}; RAY_AUTH_MODE is {mode} here); set"
        " RAY_AUTH_MODE=token here, and copy ~/.ray/auth_token from the head to this machine (or"
        " set RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN)",
        code=TOKEN_CODE,
    )
