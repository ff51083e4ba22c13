"""Access to a cluster: check that its head accepts the TLS certificate and the token of this
process, before Ray does.

With RAY_USE_TLS=1, Ray's gRPC channels use TLS with certificates of both sides. On a mismatch, Ray
waits for a minute or more, or aborts the process without an exception; a handshake beforehand finds
the error within a second.

A local Ray writes a token into its user's home. `ray start --head` then demands it, but drivers and
other nodes send it only with RAY_AUTH_MODE=token. On a mismatch Ray fails after 20 seconds, without
the reason.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Mapping

from ray.exceptions import AuthenticationError

from freezer.errors import InfrastructureError

USE_TLS = "RAY_USE_TLS"
TLS_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
_NAMES = ", ".join(TLS_FILES)

TLS_CODE, TOKEN_CODE = "CP-RAY-TLS", "CP-RAY-TOKEN"

LOOPBACK = ("127.0.0.1", "localhost")
"""Hosts that Ray replaces by the machine's own address, which it expects in the head's certificate.
"""


def check_tls(
    host: str, port: int, *, limit_s: float, environ: Mapping[str, str] = os.environ
) -> None:
    """Check that a gRPC server uses TLS if and only if this process does.

    Args:
        host, port: address of the head.
        limit_s: time limit of each response. A silent server is left to Ray.
        environ: environment with Ray's variables.

    Raises:
        InfrastructureError: only one side uses TLS, the variables are incomplete, or a certificate
            is rejected.
        OSError: nothing listens at the address.
    """
    uses_tls = environ.get(USE_TLS, "0").lower() in ("1", "true")
    context = _context(environ) if uses_tls else ssl._create_unverified_context()
    if uses_tls:
        context.check_hostname = host not in LOOPBACK
    problem = _handshake_problem(context, host, port, limit_s, uses_tls=uses_tls)
    if uses_tls and problem is not None:
        remedy = (
            f"if the head was started without TLS, unset {USE_TLS} here; if not, {TLS_FILES[0]}"
            f" here and on the head must be certificates of the authority in {TLS_FILES[2]}, the"
            " head's for this address"
        )
    elif not uses_tls and (problem is None or "ALERT" in getattr(problem, "reason", "")):
        remedy = (
            f"it uses TLS: set {USE_TLS}=1 here too, and {_NAMES} to files of the cluster's"
            " authority"
        )
    else:
        return
    reason = "" if problem is None else f" ({_words(problem)})"
    raise InfrastructureError(
        f"Ray at {host}:{port} and this process do not agree on TLS{reason}; {remedy}",
        code=TLS_CODE,
    )


def _handshake_problem(
    context: ssl.SSLContext, host: str, port: int, limit_s: float, *, uses_tls: bool
) -> Exception | None:
    """Return why a handshake fails; None if it succeeds."""
    with socket.create_connection((host, port), timeout=limit_s) as line:
        try:
            with context.wrap_socket(line, server_hostname=host) as secure:
                if uses_tls:
                    _await_settings(secure)
        except (ssl.SSLError, ConnectionError, TimeoutError) as error:
            return error
    return None


def _await_settings(secure: ssl.SSLSocket) -> None:
    """Wait for the settings that a gRPC server sends once it has accepted the client's certificate:
    in TLS 1.3, after the handshake.
    """
    with contextlib.suppress(TimeoutError):
        if not secure.recv(1):
            raise ConnectionResetError


def _context(environ: Mapping[str, str]) -> ssl.SSLContext:
    """Return the context that Ray would use."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        certificate, key, authority = (environ[name] for name in TLS_FILES)
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key)
    except (KeyError, OSError) as error:
        raise InfrastructureError(
            f"{USE_TLS} is set, but {_NAMES} do not name a certificate, its key and an authority in"
            f" PEM ({_words(error)})",
            code=TLS_CODE,
        ) from error
    return context


def _words(error: Exception) -> str:
    detail = getattr(error, "verify_message", None) or getattr(error, "reason", None) or error
    return str(detail).replace("_", " ").lower()


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
