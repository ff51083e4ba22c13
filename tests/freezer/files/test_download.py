"""Downloads from real local servers: TLS, S3, and servers that misbehave."""

from __future__ import annotations

import hashlib
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from freezer.errors import IntegrityError, SourceError
from freezer.files import download, fetch, identity, is_url
from tests.support.buckets import overwrite
from tests.support.raylets import ROOT
from tests.support.registries import make_certificate

CONTENT = b"the bytes of a model" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; some paths are served badly."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(f"GET {self.path}")
        if self.path == "/short.pt":
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT[:100])
            self.close_connection = True
        elif self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
        else:
            super().do_GET()

    def do_HEAD(self) -> None:
        self.asked.append(f"HEAD {self.path}")
        super().do_HEAD()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def asked() -> list[str]:
    return []


def serve(folder: Path, asked: list[str], context: ssl.SSLContext | None) -> Iterator[str]:
    folder.mkdir(exist_ok=True)
    handler = type("Here", (Handler,), {"asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"{'https' if context else 'http'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def https(tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server over TLS that this process trusts, and the folder `served`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate, key = make_certificate(tmp_path)
    context.load_cert_chain(certificate, key)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    yield from serve(tmp_path / "served", asked, context)


@pytest.fixture
def http(tmp_path: Path, asked: list[str]) -> Iterator[str]:
    yield from serve(tmp_path / "served", asked, None)


def test_files_are_stored_under_their_digest(tmp_path: Path, https: str) -> None:
    (tmp_path / "served" / "model.pt").write_bytes(CONTENT)
    path = fetch(f"{https}/model.pt?token=1", tmp_path / "fetched")
    assert path == tmp_path / "fetched" / DIGEST / "model.pt"
    assert path.read_bytes() == CONTENT
    assert [item.name for item in (tmp_path / "fetched").iterdir()] == [DIGEST]


KILLED = """
import os, signal, sys
from pathlib import Path
from freezer.files import download
download.digest_file = lambda path: os.kill(os.getpid(), signal.SIGKILL)
download.fetch(sys.argv[1], Path(sys.argv[2]))
"""


def test_a_killed_download_leaves_nothing(tmp_path: Path, https: str) -> None:
    (tmp_path / "served" / "model.pt").write_bytes(CONTENT)
    folder = tmp_path / "fetched"
    command = [sys.executable, "-c", KILLED, f"{https}/model.pt", str(folder)]
    assert subprocess.run(command, check=False, cwd=ROOT).returncode == -signal.SIGKILL
    assert [path.read_bytes() for path in folder.glob("*/model.pt")] == [CONTENT]
    path = fetch(f"{https}/model.pt", folder)
    assert list(folder.iterdir()) == [path.parent]


def test_pinned_files_are_fetched_once(tmp_path: Path, https: str, asked: list[str]) -> None:
    (tmp_path / "served" / "model.pt").write_bytes(CONTENT)
    for _ in range(3):
        fetch(f"{https}/model.pt", tmp_path / "fetched", sha256=DIGEST)
    assert asked == ["GET /model.pt"]


def test_fetch_rejects_another_digest(tmp_path: Path, https: str) -> None:
    (tmp_path / "served" / "model.pt").write_bytes(CONTENT + b"!")
    with pytest.raises(IntegrityError) as caught:
        fetch(f"{https}/model.pt", tmp_path / "fetched", sha256=DIGEST)
    assert caught.value.code == "CP-FETCH-DIGEST"
    assert list((tmp_path / "fetched").iterdir()) == []


@pytest.mark.parametrize("path", ["none.pt", "short.pt"])
def test_missing_and_truncated_files_leave_nothing(tmp_path: Path, https: str, path: str) -> None:
    with pytest.raises(SourceError) as caught:
        fetch(f"{https}/{path}", tmp_path / "fetched")
    assert caught.value.code == "CP-FETCH"
    assert list((tmp_path / "fetched").iterdir()) == []


def test_unreachable_and_untrusted_servers_are_errors(
    tmp_path: Path, https: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "http_session", partial(download.http_session, retries=0))
    with pytest.raises(SourceError):
        fetch("https://127.0.0.1:9/model.pt", tmp_path / "fetched")
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    with pytest.raises(SourceError):
        fetch(f"{https}/model.pt", tmp_path / "fetched")


def test_plain_http_needs_a_digest(tmp_path: Path, http: str) -> None:
    (tmp_path / "served" / "model.pt").write_bytes(CONTENT)
    with pytest.raises(SourceError):
        fetch(f"{http}/model.pt", tmp_path / "fetched")
    assert fetch(f"{http}/model.pt", tmp_path / "fetched", sha256=DIGEST).is_file()


def test_a_redirect_to_plain_http_is_refused(tmp_path: Path, https: str, http: str) -> None:
    (tmp_path / "served" / "model.pt").write_bytes(CONTENT)
    with pytest.raises(SourceError):
        fetch(f"{https}/to/{http}/model.pt", tmp_path / "fetched")


def test_identity_changes_with_the_file(tmp_path: Path, https: str) -> None:
    model = tmp_path / "served" / "model.pt"
    model.write_bytes(CONTENT)
    before = identity(f"{https}/model.pt")
    assert before == identity(f"{https}/model.pt")
    model.write_bytes(CONTENT + b"!")
    assert before != identity(f"{https}/model.pt")
    assert identity(f"{https}/none.pt") is None


def test_fetch_from_s3(tmp_path: Path, bucket: str, s3_address: str) -> None:
    url = f"{bucket}/model.pt"
    overwrite(s3_address, url.removeprefix("s3://"), CONTENT)
    assert is_url(url)
    assert fetch(url, tmp_path / "fetched", sha256=DIGEST).read_bytes() == CONTENT
    assert identity(url) == identity(url) is not None
    with pytest.raises(SourceError):
        fetch(f"{bucket}/none.pt", tmp_path / "fetched")
    with pytest.raises(IntegrityError):
        fetch(url, tmp_path / "fetched", sha256="0" * 64)
