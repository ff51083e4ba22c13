"""TLS of Ray: whether this process and a cluster's head will understand each other. Imports no ray.

Ray's gRPC channels speak TLS, with certificates of both sides, where RAY_USE_TLS is 1. Where the two do not fit, Ray itself waits
for a minute or more, or aborts the process without an exception; a handshake beforehand tells in a second what is wrong.
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
"""For which Ray takes the machine's own address, and asks for that in the head's certificate."""

_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client says first in HTTP/2, which gRPC is made of: the preface, and a frame of settings without any."""

_ALERT = b"\x15"
"""What TLS begins with that has not understood. Some servers just break off; one without TLS answers with its settings."""


def check_tls(host: str, port: int, *, limit_s: float, environ: Mapping[str, str] = os.environ) -> None:
    """Return if a gRPC server speaks TLS, or does not, as this process does.

    Args:
        host, port: of the head.
        limit_s: of waiting for each answer. A server that says nothing meanwhile is left to Ray.
        environ: with Ray's variables.

    Raises:
        InfrastructureError: one of both speaks TLS alone, the variables are incomplete, or a certificate is not accepted.
        OSError: nothing listens there.
    """
    used = environ.get(USE, "0").lower() in ("1", "true")
    context = _context(environ) if used else None
    if context is not None:
        context.check_hostname = host not in LOOPBACK
    where = f"Ray at {host}:{port}"
    with socket.create_connection((host, port), timeout=limit_s) as line:
        try:
            if context is None:
                answer = _answer(line)
                if answer is not None and answer[:1] in (b"", _ALERT):
                    raise InfrastructureError(
                        f"{where} does not answer a client without TLS; if it was started with {USE}=1, set that here too, and "
                        f"{', '.join(FILES)} to files of the cluster's authority",
                        code=CODE,
                    )
                return
            with context.wrap_socket(line, server_hostname=host) as secure:
                _answer(secure)  # in TLS 1.3 a server refuses a client's certificate only after the handshake
        except ssl.SSLError as error:
            raise InfrastructureError(
                f"{where} and this process do not agree on TLS ({_reason(error)}); {_remedy(error)}", code=CODE
            ) from error
        except (ConnectionError, TimeoutError):
            if context is not None:
                raise InfrastructureError(
                    f"{where} breaks off a client with TLS; if it was started without, unset {USE} here; else see that {FILES[0]} "
                    "is a certificate of the cluster's authority",
                    code=CODE,
                ) from None


def _context(environ: Mapping[str, str]) -> ssl.SSLContext:
    """What Ray would use.

    Raises:
        InfrastructureError: a variable or file is missing, or is no certificate.
    """
    for name in FILES:
        if not environ.get(name) or not Path(environ[name]).is_file():
            got = f"is {environ[name]!r}, which is no file" if environ.get(name) else "is not set"
            raise InfrastructureError(f"{USE} is set, and {name} {got}; Ray needs {', '.join(FILES)}", code=CODE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    certificate, key, authority = (environ[name] for name in FILES)
    try:
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise InfrastructureError(
            f"{', '.join(FILES)} are no certificate, its key and an authority in PEM ({_reason(error)}); see what they name",
            code=CODE,
        ) from error
    return context


def _answer(line: socket.socket) -> bytes | None:
    """The first bytes that a server says, empty where it breaks off; None where it says nothing in time."""
    try:
        line.sendall(_HELLO)
        return line.recv(9)
    except TimeoutError:
        return None
    except ssl.SSLError:
        raise
    except ConnectionError:
        return b""


def _reason(error: ssl.SSLError) -> str:
    found = getattr(error, "verify_message", None) or error.reason or error
    return str(found).replace("_", " ").lower()


def _remedy(error: ssl.SSLError) -> str:
    if error.reason == "WRONG_VERSION_NUMBER":
        return f"it was started without TLS: unset {USE} here"
    return f"{FILES[0]} here and on the head must be certificates of the authority in {FILES[2]}, the head's for this address"
