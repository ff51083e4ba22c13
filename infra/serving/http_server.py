"""The HTTP server of one model. GET / lists its endpoints; those of the open inference protocol are
in open_inference.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from socket import socket

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from infra.serving.bodies import refusal
from infra.serving.model_server import KEY, ModelServer
from infra.serving.open_inference import OPEN_ENDPOINTS, OpenInference

SERVICE_ENDPOINTS: Mapping[str, str] = {
    "POST /predict": "outputs by name for inputs by name: JSON, or .safetensors as"
    " application/octet-stream",
    "GET /contract": "names, dtypes and shapes of inputs and outputs",
    "GET /ready": "200 after the canary has passed, 503 before",
    "GET /live": "200",
    "GET /metrics": "for Prometheus",
    **OPEN_ENDPOINTS,
}
"""The endpoints, with what each one returns."""

KEEP_ALIVE_S = 75
"""How long idle connections stay open: longer than load balancers keep them (60 s), which would
otherwise meet closed ones.
"""

DRAIN_S = 1.0
"""How long clients that keep a connection may still use it after SIGTERM; each answer asks them to
close it.
"""


def make_app(server: ModelServer) -> FastAPI:
    """The service of one model; it loads the model when it starts."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(server.watch())
        yield
        watching.cancel()

    app = FastAPI(title="Coldpress", lifespan=lifespan, openapi_url=None)
    app.include_router(OpenInference(server).router())

    @app.get("/")
    async def endpoints() -> Response:
        return JSONResponse({"model": server.model, "endpoints": SERVICE_ENDPOINTS})

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        headers = request.headers
        return await server.answer(
            request.stream(), headers.get("content-type", ""), headers.get(KEY)
        )

    @app.get("/contract")
    async def contract() -> Response:
        return server.contract()

    @app.get("/ready")
    async def ready() -> Response:
        return (
            refusal(503, server.problem)
            if server.loaded is None
            else JSONResponse(dict(server.loaded.labels))
        )

    @app.get("/live")
    async def live() -> Response:
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(server.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


class DrainingServer(uvicorn.Server):
    """uvicorn's server, without its race at the end: it closes connections on which a client may
    just be sending a request.
    """

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Refuse new connections at once, and close the others after DRAIN_S."""
        for listening in self.servers:
            listening.close()
        self.server_state.default_headers = [
            *self.server_state.default_headers,
            (b"connection", b"close"),
        ]
        if self.server_state.connections:
            await asyncio.sleep(DRAIN_S)
        await super().shutdown(sockets)


def http_server(server: ModelServer, *, host: str, port: int) -> uvicorn.Server:
    """The HTTP server of a service; `run` returns after SIGTERM."""
    config = uvicorn.Config(
        make_app(server),
        host=host,
        port=port,
        ws="none",
        access_log=False,
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    return DrainingServer(config)
