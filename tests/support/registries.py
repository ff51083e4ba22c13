"""Registries for tests: Debian's docker-registry over TLS with users, and a front before it that
counts, changes and cuts off answers.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

from tests.support.raylets import LOOPBACK, free_port, wait_until

USER, SECRET = "robot", "s3cret-word"
BASIC = base64.b64encode(f"{USER}:{SECRET}".encode()).decode()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningRegistry:
    """A registry on the loopback address.

    Attributes:
        host: HOST:PORT.
        authority: file of its certificate, which is its own authority.
        docker_config: folder with a config.json that has the login.
        storage: its files.
    """

    host: str
    authority: Path
    docker_config: Path
    storage: Path


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Files of a certificate of 127.0.0.1, which is its own authority, and of its key."""
    certificate, key = folder / "server.crt", folder / "server.key"
    command = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-days", "2"]
    command += ["-pkeyopt", "ec_paramgen_curve:P-256", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key)]
    subprocess.run([*command, "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


def write_login(folder: Path, *hosts: str, **more: Any) -> None:
    """Write docker's config.json with the login of hosts."""
    folder.mkdir(exist_ok=True)
    auths = {host: {"auth": BASIC} for host in hosts}
    (folder / "config.json").write_text(json.dumps({"auths": auths, **more}))


@contextlib.contextmanager
def running_registry(folder: Path) -> Iterator[RunningRegistry]:
    """Run Debian's docker-registry with TLS and basic authentication."""
    for program in ("docker-registry", "htpasswd", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(
                f"{program} is not installed: apt-get install docker-registry apache2-utils openssl"
            )
    certificate, key = make_certificate(folder)
    users = subprocess.run(
        ["htpasswd", "-Bbn", USER, SECRET], capture_output=True, text=True, check=True
    )
    (folder / "users").write_text(users.stdout)
    host, storage = f"{LOOPBACK}:{free_port()}", folder / "storage"
    config = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {
            "filesystem": {"rootdirectory": str(storage)},
            "delete": {"enabled": True},
            "maintenance": {"uploadpurging": {"enabled": False}},
        },
        "http": {"addr": host, "tls": {"certificate": str(certificate), "key": str(key)}},
        "auth": {"htpasswd": {"realm": "test", "path": str(folder / "users")}},
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            ["docker-registry", "serve", str(folder / "config.yml")], stdout=log, stderr=log
        )
    try:
        wait_until(lambda: _listens(host), "docker-registry starts", 20)
        write_login(folder / "docker", host)
        yield RunningRegistry(
            host=host, authority=certificate, docker_config=folder / "docker", storage=storage
        )
    finally:
        child.terminate()
        child.wait(10)


def _listens(host: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, int(host.rpartition(":")[2]))) == 0


@dataclass
class Answer:
    """An answer of the registry, which a hook may change."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Front:
    """A port without TLS before a registry, which it logs in to.

    Attributes:
        asked: method, path and headers of each request.
        before: answers in place of the registry, or None.
        after: changes the registry's answer.
        cut_at: number of bytes of each blob after which its connection breaks.
    """

    behind: RunningRegistry
    asked: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)
    before: Callable[[str, str, Mapping[str, str]], Answer | None] = lambda *_: None
    after: Callable[[str, Answer], None] = lambda *_: None
    cut_at: int | None = None
    host: str = ""
    prefix: str = field(default_factory=lambda: f"front-{uuid.uuid4().hex[:12]}")

    def __post_init__(self) -> None:
        context = ssl.create_default_context(cafile=str(self.behind.authority))
        self._pool = urllib3.PoolManager(ssl_context=context, maxsize=16)

    def uri(self, name: str) -> str:
        """The URI of a store that no other front has."""
        return f"oci://{self.host}/{self.prefix}/{name}?scheme=http"

    def num_asked(self, method: str, part: str) -> int:
        """Number of requests of a method whose path contains a text."""
        return sum(1 for name, path, _ in self.asked if name == method and part in path)

    def forward(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        kept = {
            name: value
            for name, value in headers.items()
            if name.lower() not in ("host", "authorization", "connection")
        }
        found = self._pool.request(
            method,
            f"https://{self.behind.host}{path}",
            body=body,
            headers={**kept, "Authorization": f"Basic {BASIC}"},
            redirect=False,
            decode_content=False,
        )
        kept = {name: value for name, value in found.headers.items() if name != "Connection"}
        if "Location" in kept:
            kept["Location"] = kept["Location"].replace(
                f"https://{self.behind.host}", f"http://{self.host}"
            )
        return Answer(found.status, kept, found.data)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        with contextlib.suppress(OSError):
            super().handle_one_request()
            return
        self.close_connection = True

    def _answer(self) -> None:
        front: Front = self.server.front  # type: ignore[attr-defined]
        headers = dict(self.headers.items())
        body = self.rfile.read(int(headers.get("Content-Length", 0)))
        front.asked.append((self.command, self.path, headers))
        answer = front.before(self.command, self.path, headers)
        if answer is None:
            answer = front.forward(self.command, self.path, headers, body)
            front.after(self.path, answer)
        self.send_response_only(answer.status)
        is_head = self.command == "HEAD"
        answer.headers.setdefault("Content-Length", str(len(answer.body)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if is_head:
            return
        if front.cut_at is not None and "/blobs/" in self.path and self.command == "GET":
            self.wfile.write(answer.body[: front.cut_at])
            self.close_connection = len(answer.body) > front.cut_at
        else:
            self.wfile.write(answer.body)

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def front_of(behind: RunningRegistry, *, tls: bool = False) -> Iterator[Front]:
    """Open a front, with the registry's certificate or without TLS."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    if tls:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(behind.authority, behind.authority.with_suffix(".key"))
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = True
    front = Front(behind=behind, host=f"127.0.0.1:{server.server_address[1]}")
    server.front = front  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield front
    finally:
        front._pool.clear()
        server.shutdown()
        server.server_close()
        thread.join(10)
