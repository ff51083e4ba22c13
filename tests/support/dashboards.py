"""A small dashboard with Ray's job API, which can become silent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import ray
from aiohttp import web

from tests.support.raylets import LOOPBACK

LOOK_S = 0.02


class Dashboard:
    """A dashboard on loopback.

    Attributes:
        jobs: details by id.
        log: log of the job.
        silent: whether it accepts connections without answering, like a proxy of a dead machine.
        num_bytes: bytes of uploaded packages.
        pause_s: pause before the next piece of a package is read.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.log, self.silent, self.num_bytes, self.pause_s = "", False, 0, 0.0
        self.address = ""

    def job(self, job_id: str, status: str, **details: Any) -> None:
        """Add or change a job."""
        known = self.jobs.setdefault(
            job_id, {"type": "SUBMISSION", "submission_id": job_id, "entrypoint": "e"}
        )
        known.update(status=status, **details)

    def app(self) -> web.Application:
        """Return the application."""

        @web.middleware
        async def answered(request: web.Request, handler: Any) -> Any:
            await self._speaks()
            return await handler(request)

        app = web.Application(middlewares=[answered], client_max_size=1 << 30)
        app.router.add_get("/api/version", self._version)
        app.router.add_get("/api/jobs/", self._list)
        app.router.add_post("/api/jobs/", self._submit)
        app.router.add_get("/api/jobs/{id}", self._info)
        app.router.add_get("/api/jobs/{id}/logs", self._logs)
        app.router.add_get("/api/packages/{protocol}/{name}", self._no_package)
        app.router.add_put("/api/packages/{protocol}/{name}", self._package)
        return app

    async def _speaks(self) -> None:
        while self.silent:
            await asyncio.sleep(LOOK_S)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"version": "4", "ray_version": ray.__version__, "ray_commit": "", "session_name": "s"}
        )

    async def _list(self, _: web.Request) -> web.Response:
        return web.json_response(list(self.jobs.values()))

    async def _submit(self, request: web.Request) -> web.Response:
        job_id = (await request.json())["submission_id"]
        self.job(job_id, "PENDING")
        return web.json_response({"job_id": job_id, "submission_id": job_id})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response(self.jobs[request.match_info["id"]])

    async def _no_package(self, _: web.Request) -> web.Response:
        return web.Response(status=404)

    async def _package(self, request: web.Request) -> web.Response:
        async for piece in request.content.iter_chunked(1 << 20):
            self.num_bytes += len(piece)
            await asyncio.sleep(self.pause_s)
        return web.json_response({})

    async def _logs(self, _: web.Request) -> web.Response:
        return web.json_response({"logs": self.log})


@contextlib.contextmanager
def serving() -> Iterator[Dashboard]:
    """Serve a dashboard during a block."""
    dashboard, loop = Dashboard(), asyncio.new_event_loop()
    runner = web.AppRunner(dashboard.app(), handler_cancellation=True, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        server = socket.create_server((LOOPBACK, 0))
        server.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16
        )  # uploads wait until they are read
        await web.SockSite(runner, server).start()
        dashboard.address = f"http://{LOOPBACK}:{server.getsockname()[1]}"

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield dashboard
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
