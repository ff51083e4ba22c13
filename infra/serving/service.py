"""`python -m infra.serving.service MODEL --store URI`: serve one frozen model over HTTP.

    POST /predict    inputs and outputs by name: JSON, or .safetensors as application/octet-stream
    GET /contract    names, dtypes and shapes of inputs and outputs
    GET /ready       200 after the canary has passed, 503 before
    GET /live        200
    GET /metrics     for Prometheus

SIGTERM stops it after the requests that it has accepted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from socket import socket
from typing import Annotated

import typer
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from freezer.cli import (
    ClassOption,
    KeysOption,
    MinVersionOption,
    ModelArgument,
    StoreOption,
    ThreadsOption,
    exiting,
)
from freezer.errors import USAGE
from infra.serving.model_server import ModelServer, ServingOptions, refusal

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

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        return await server.answer(request.stream(), request.headers.get("content-type", ""))

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


def main(
    model: ModelArgument,
    store: StoreOption = "./store",
    device_class: ClassOption = "auto",
    threads: ThreadsOption = None,
    runtime: Annotated[
        str | None,
        typer.Option("--runtime", hidden=True, help="Of earlier releases; without effect."),
    ] = None,
    min_version: MinVersionOption = 0,
    key: KeysOption = None,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait while one runs.")] = 32,
    reload_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two checks for a new version.")
    ] = 30.0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="PORT", help="Port to listen on.")] = 8000,
) -> None:
    """Serve a frozen model over HTTP, and each new version of it."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    options = ServingOptions(
        model=model,
        store=store,
        device_class=device_class,
        threads=threads,
        min_version=min_version,
        keys=tuple(key or ()),
        queue=queue,
        reload_s=reload_s,
    )
    with exiting(refused=USAGE):
        server = ModelServer(options)
    signal.signal(
        signal.SIGTERM, lambda *_: os._exit(0)
    )  # which uvicorn sends again after its shutdown
    with suppress(KeyboardInterrupt):
        http_server(server, host=host, port=port).run()


if __name__ == "__main__":
    typer.run(main)
