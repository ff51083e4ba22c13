"""Fetching: real servers on the loopback address, over TLS, S3's protocol, and with every way to send something else."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import ssl
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from freezer.errors import IntegrityError, SourceError
from freezer.files.download import fetch, identity, is_url
from freezer.freezing.models.loaders import load_source
from freezer.freezing.models.sources import fetched, parse_source
from freezer.runtime.jit_warnings import torchscript_deprecations_silenced
from tests.models import mlp

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
    certificate = make_certificate(tmp_path / "loopback.pem")
    context.load_cert_chain(certificate)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
    yield from serve(tmp_path / "served", asked, context)


@pytest.fixture
def http(tmp_path: Path, asked: list[str]) -> Iterator[str]:
    yield from serve(tmp_path / "served", asked, None)


def make_certificate(path: Path) -> Path:
    """A key and a certificate for 127.0.0.1 that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    return path


def test_a_file_is_fetched_over_tls_and_lies_under_its_digest(tmp_path: Path, https: str) -> None:
    (tmp_path / "served" / "model.pt").write_bytes(CONTENT)
    path = fetch(f"{https}/model.pt?token=1", tmp_path / "fetched")
    assert path == tmp_path / "fetched" / DIGEST / "model.pt"
    assert path.read_bytes() == CONTENT
    assert [item.name for item in (tmp_path / "fetched").iterdir()] == [DIGEST]


def test_a_pinned_file_is_fetched_once(tmp_path: Path, https: str, asked: list[str]) -> None:
    (tmp_path / "served" / "model.pt").write_bytes(CONTENT)
    for _ in range(3):
        fetch(f"{https}/model.pt", tmp_path / "fetched", sha256=DIGEST)
    assert asked == ["GET /model.pt"]


def test_another_digest_is_refused_and_leaves_nothing(tmp_path: Path, https: str) -> None:
    (tmp_path / "served" / "model.pt").write_bytes(CONTENT + b"!")
    with pytest.raises(
        IntegrityError, match=f"got sha256 [0-9a-f]{{64}}, expected {DIGEST}; .*, `sha256:` .*`--sha256`.*old one"
    ) as caught:
        fetch(f"{https}/model.pt", tmp_path / "fetched", sha256=DIGEST)
    assert caught.value.code == "CP-FETCH-DIGEST"
    assert list((tmp_path / "fetched").iterdir()) == []


@pytest.mark.parametrize("path", ["none.pt", "short.pt"])
def test_what_is_not_there_or_comes_in_part_leaves_nothing(tmp_path: Path, https: str, path: str) -> None:
    with pytest.raises(SourceError, match=f"{path} cannot be fetched: .*; is it there, and may it be read") as caught:
        fetch(f"{https}/{path}", tmp_path / "fetched")
    assert caught.value.code == "CP-FETCH"
    assert list((tmp_path / "fetched").iterdir()) == []


def test_a_server_that_is_not_there_or_not_trusted_is_one_error(
    tmp_path: Path, https: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SourceError, match="cannot be fetched"):
        fetch("https://127.0.0.1:9/model.pt", tmp_path / "fetched")
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    with pytest.raises(SourceError, match=r"cannot be fetched: .*certificate verify failed"):
        fetch(f"{https}/model.pt", tmp_path / "fetched")


def test_plain_http_needs_a_digest(tmp_path: Path, http: str) -> None:
    (tmp_path / "served" / "model.pt").write_bytes(CONTENT)
    with pytest.raises(SourceError, match=r"http:// is taken only with a digest; .* add `sha256:` \(.*`--sha256`\)"):
        fetch(f"{http}/model.pt", tmp_path / "fetched")
    assert fetch(f"{http}/model.pt", tmp_path / "fetched", sha256=DIGEST).is_file()


def test_a_redirect_to_plain_http_is_refused(tmp_path: Path, https: str, http: str) -> None:
    (tmp_path / "served" / "model.pt").write_bytes(CONTENT)
    with pytest.raises(SourceError, match=r"leads to http://.*, which is not https; add `sha256:` \(.*`--sha256`\)"):
        fetch(f"{https}/to/{http}/model.pt", tmp_path / "fetched")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of one page; the test is skipped where none may be mounted."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_told_as_such(https: str, tmp_path: Path, full_disk: Path) -> None:
    (tmp_path / "served" / "model.pt").write_bytes(CONTENT)
    with pytest.raises(OSError, match="No space left on device"):
        fetch(f"{https}/model.pt", full_disk)
    assert list(full_disk.iterdir()) == []


def test_the_identity_of_a_file_changes_with_it(tmp_path: Path, https: str) -> None:
    model = tmp_path / "served" / "model.pt"
    model.write_bytes(CONTENT)
    before = identity(f"{https}/model.pt")
    assert before == identity(f"{https}/model.pt")
    model.write_bytes(CONTENT + b"!")
    assert before != identity(f"{https}/model.pt")
    assert identity(f"{https}/none.pt") is None


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket with one object, behind S3's protocol."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="models")
    client.put_object(Bucket="models", Key="a/model.pt", Body=CONTENT)
    try:
        yield "s3://models/a/model.pt"
    finally:
        client.close()
        server.stop()


def test_an_object_is_fetched_from_s3(tmp_path: Path, s3: str) -> None:
    assert is_url(s3)
    assert fetch(s3, tmp_path / "fetched", sha256=DIGEST).read_bytes() == CONTENT
    assert identity(s3) == identity(s3) is not None
    with pytest.raises(SourceError, match=r"none\.pt cannot be fetched"):
        fetch(s3.replace("model.pt", "none.pt"), tmp_path / "fetched")
    with pytest.raises(IntegrityError, match="expected 0000"):
        fetch(s3, tmp_path / "fetched", sha256="0" * 64)


def test_a_source_may_be_a_url(tmp_path: Path, https: str) -> None:
    with torchscript_deprecations_silenced():
        torch.jit.save(torch.jit.script(mlp()), str(tmp_path / "served" / "mlp.jit"))
    source = parse_source(f"torchscript:{https}/mlp.jit", folder=tmp_path)
    assert source.location == f"{https}/mlp.jit"
    local = fetched(source, tmp_path / "fetched")
    assert str(local) == f"torchscript:{https}/mlp.jit"
    x = torch.ones(2, 4)
    assert torch.equal(load_source(local)(x), mlp()(x))
