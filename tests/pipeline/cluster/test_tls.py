"""TLS agreement of a driver and a server: plain socket servers with and without TLS."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from freezer.errors import InfrastructureError
from pipeline.cluster.access import TLS_FILES, check_tls
from tests.support.heads import certificates

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs openssl to make certificates"
)

SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return certificates(tmp_path_factory.mktemp("tls") / "own")


@contextlib.contextmanager
def served(
    wrap: Callable[[socket.socket], socket.socket], greeting: bytes = SETTINGS
) -> Iterator[int]:
    """The port of a server that sends its settings first, as gRPC does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with (
                        contextlib.suppress(ssl.SSLError, ConnectionError),
                        wrap(server.accept()[0]) as line,
                    ):
                        line.sendall(greeting)
                        line.recv(1024)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def plain(line: socket.socket) -> socket.socket:
    return line


def secured(names: dict[str, str]) -> Callable[[socket.socket], socket.socket]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=names[TLS_FILES[2]])
    context.load_cert_chain(names[TLS_FILES[0]], names[TLS_FILES[1]])
    context.verify_mode = ssl.CERT_REQUIRED
    return lambda line: context.wrap_socket(line, server_side=True)


def check(port: int, environ: dict[str, str]) -> None:
    check_tls("127.0.0.1", port, limit_s=3.0, environ=environ)


def test_matching_sides_pass(own: dict[str, str]) -> None:
    with served(plain) as port:
        check(port, {})
    with served(secured(own)) as port:
        check(port, own)


def test_a_silent_server_is_left_to_ray() -> None:
    with served(plain, greeting=b"") as port:
        check_tls("127.0.0.1", port, limit_s=0.2, environ={})


def rejected(port: int, environ: dict[str, str]) -> str:
    """The message of a rejection."""
    with pytest.raises(InfrastructureError) as caught:
        check(port, environ)
    assert caught.value.code == "CP-RAY-TLS"
    return str(caught.value)


def test_a_single_side_with_tls_is_an_error(own: dict[str, str]) -> None:
    with served(secured(own)) as port:
        assert "set RAY_USE_TLS=1 here" in rejected(port, {})
    with served(plain) as port:
        assert "unset RAY_USE_TLS here" in rejected(port, own)


def test_certificates_of_another_authority_are_rejected(
    own: dict[str, str], tmp_path: Path
) -> None:
    other = certificates(tmp_path / "other")
    with served(secured(own)) as port:
        rejected(port, other)
        # it trusts the server, which does not trust it
        rejected(port, {**other, TLS_FILES[2]: own[TLS_FILES[2]]})


@pytest.mark.parametrize("name", TLS_FILES)
def test_missing_files_are_rejected(own: dict[str, str], tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").touch()
    without = {key: value for key, value in own.items() if key != name}
    for environ in (without, {**own, name: "/nowhere"}, {**own, name: str(tmp_path / "empty")}):
        with served(plain) as port:
            rejected(port, environ)
