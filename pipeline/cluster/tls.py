"""TLS of Ray: check that this process and a cluster's head agree on it. Imports no ray.

With RAY_USE_TLS=1, Ray's gRPC channels use TLS with certificates of both sides. On a mismatch, Ray
waits for a minute or more, or aborts the process without an exception; a handshake beforehand finds
the error within a second.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path

from freezer.errors import InfrastructureError

USE = "RAY_USE_TLS"
FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
CODE = "CP-RAY-TLS"

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
    uses_tls = environ.get(USE, "0").lower() in ("1", "true")
    context = _context(environ) if uses_tls else ssl._create_unverified_context()
    if uses_tls:
        context.check_hostname = host not in LOOPBACK
    problem: Exception | None = None
    with socket.create_connection((host, port), timeout=limit_s) as line:
        try:
            with context.wrap_socket(line, server_hostname=host) as secure:
                if uses_tls:
                    _await_settings(
                        secure
                    )  # in TLS 1.3 a server rejects a client's certificate after the handshake
        except (ssl.SSLError, ConnectionError, TimeoutError) as error:
            problem = error
    reason = problem.reason or "" if isinstance(problem, ssl.SSLError) else ""
    if uses_tls and problem is not None:
        remedy = (
            f"if the head was started without TLS, unset {USE} here; if not, {FILES[0]} here and on"
            f" the head must be certificates of the authority in {FILES[2]}, the head's for this"
            " address"
        )
    elif not uses_tls and (problem is None or "ALERT" in reason):
        remedy = (
            f"it uses TLS: set {USE}=1 here too, and {', '.join(FILES)} to files of the cluster's"
            " authority"
        )
    else:
        return
    why = f" ({_words(problem)})" if problem is not None else ""
    raise InfrastructureError(
        f"Ray at {host}:{port} and this process do not agree on TLS{why}; {remedy}", code=CODE
    )


def _context(environ: Mapping[str, str]) -> ssl.SSLContext:
    """Return the context that Ray would use."""
    for name in FILES:
        if not environ.get(name) or not Path(environ[name]).is_file():
            got = (
                f"is {environ[name]!r}, which is not a file" if environ.get(name) else "is not set"
            )
            raise InfrastructureError(
                f"{USE} is set, but {name} {got}; Ray needs {', '.join(FILES)}", code=CODE
            )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    certificate, key, authority = (environ[name] for name in FILES)
    try:
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise InfrastructureError(
            f"{', '.join(FILES)} are not a certificate, its key and an authority in PEM"
            f" ({_words(error)})",
            code=CODE,
        ) from error
    return context


def _await_settings(secure: ssl.SSLSocket) -> None:
    """Wait for the settings that a gRPC server sends after it has accepted the client's
    certificate.
    """
    try:
        if not secure.recv(1):
            raise ConnectionResetError
    except TimeoutError:
        return


def _words(error: Exception) -> str:
    return (
        str(getattr(error, "verify_message", None) or getattr(error, "reason", None) or error)
        .replace("_", " ")
        .lower()
    )
