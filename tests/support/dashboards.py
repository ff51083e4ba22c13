"""A small dashboard with Ray's job API, which can become silent."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import ray

from tests.support.raylets import LOOPBACK

VERSION = {"version": "4", "ray_version": ray.__version__, "ray_commit": "", "session_name": "s"}


class Dashboard(ThreadingHTTPServer):
    """A dashboard on loopback.

    Attributes:
        jobs: details by id.
        log: log of the job.
        silent: whether it accepts connections without answering, like a proxy of a dead machine.
        num_bytes: bytes of uploaded packages.
        pause_s: pause before the next piece of a package is read.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__((LOOPBACK, 0), _Answer)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.log, self.silent, self.num_bytes, self.pause_s = "", False, 0, 0.0
        self.address = f"http://{LOOPBACK}:{self.server_port}"

    def job(self, job_id: str, status: str, **details: Any) -> None:
        """Add or change a job."""
        new = {"type": "SUBMISSION", "submission_id": job_id, "entrypoint": "e"}
        self.jobs.setdefault(job_id, new).update(status=status, **details)


class _Answer(BaseHTTPRequestHandler):
    server: Dashboard

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self, body: object, status: int = 200) -> None:
        while self.server.silent:
            time.sleep(0.02)
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self) -> None:
        jobs = self.server.jobs
        match self.path.partition("?")[0].strip("/").split("/")[1:]:
            case ["version"]:
                self._answer(VERSION)
            case ["jobs"]:
                self._answer(list(jobs.values()))
            case ["jobs", job_id]:
                self._answer(jobs[job_id])
            case ["jobs", _, "logs"]:
                self._answer({"logs": self.server.log})
            case _:
                self._answer({}, 404)

    def _body(self) -> Iterator[bytes]:
        left = int(self.headers["content-length"])
        while left:
            piece = self.rfile.read(min(left, 1 << 20))
            left -= len(piece)
            yield piece

    def do_POST(self) -> None:
        job_id = json.loads(b"".join(self._body()))["submission_id"]
        self.server.job(job_id, "PENDING")
        self._answer({"job_id": job_id, "submission_id": job_id})

    def do_PUT(self) -> None:
        for piece in self._body():
            self.server.num_bytes += len(piece)
            time.sleep(self.server.pause_s)
        self._answer({})


@contextlib.contextmanager
def serving() -> Iterator[Dashboard]:
    """Serve a dashboard during a block."""
    with Dashboard() as dashboard:
        thread = threading.Thread(target=dashboard.serve_forever, args=(0.02,))
        thread.start()
        yield dashboard
        dashboard.shutdown()
        thread.join()
