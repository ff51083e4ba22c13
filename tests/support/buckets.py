"""Buckets for tests: a server of S3's protocol on the loopback address, and a wire to it that can
be cut.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""The environment of clients, without the address."""


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server without buckets."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def _filesystem(address: str) -> Any:
    from pyarrow.fs import S3FileSystem

    return S3FileSystem(endpoint_override=address, allow_bucket_creation=True)


def make_bucket(address: str, name: str) -> None:
    """Create an empty bucket."""
    _filesystem(address).create_dir(name)


def empty_bucket(address: str, name: str) -> None:
    """Remove all objects of a bucket."""
    _filesystem(address).delete_dir_contents(name)


def objects(address: str, place: str) -> dict[str, bytes]:
    """The content of all objects below BUCKET/PREFIX, by path below it."""
    from pyarrow.fs import FileSelector

    filesystem = _filesystem(address)
    contents = {}
    for info in filesystem.get_file_info(FileSelector(place, recursive=True, allow_not_found=True)):
        if info.type.name == "File":
            with filesystem.open_input_stream(info.path) as stream:
                contents[info.path.removeprefix(f"{place}/")] = stream.read()
    return contents


def overwrite(address: str, path: str, content: bytes) -> None:
    """Write an object."""
    with _filesystem(address).open_output_stream(path) as stream:
        stream.write(content)


class Wire(socketserver.ThreadingTCPServer):
    """A port that forwards to a server until it is cut, at once or at the n-th object that is
    written through it.

    Attributes:
        address: of the port.
        num_written: number of objects so far.
        cut_at: the number of the first object that does not arrive; None forwards everything.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: str) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        host, _, port = address.removeprefix("http://").partition(":")
        self.behind = (host, int(port))
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.restore()

    def __enter__(self) -> Wire:
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_cut = True
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Do not report broken connections."""

    def restore(self) -> None:
        """Forward everything again."""
        self.cut_at: int | None = None
        self.is_cut, self.num_written = False, 0


class _Forward(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        wire = self.server
        assert isinstance(wire, Wire)
        if wire.is_cut:
            return
        with socket.create_connection(wire.behind) as behind:
            back = threading.Thread(target=_copy, args=(behind, self.request, wire), daemon=True)
            back.start()
            while data := self.request.recv(1 << 16):
                if data.startswith(b"PUT "):
                    wire.num_written += 1
                    wire.is_cut = wire.is_cut or wire.num_written == wire.cut_at
                if wire.is_cut:
                    break
                behind.sendall(data)


def _copy(source: socket.socket, dest: socket.socket, wire: Wire) -> None:
    with contextlib.suppress(OSError):
        while not wire.is_cut and (data := source.recv(1 << 16)):
            dest.sendall(data)


def cached_files(cache: Path) -> list[Path]:
    """The complete and partial blobs in a cache folder."""
    return sorted((cache / "coldpress" / "blobs" / "sha256").glob("*"))
