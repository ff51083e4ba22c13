"""`coldpress serve MODEL --store URI`: serve one frozen model over HTTP. SIGTERM stops it after the
requests that it has accepted.

Imports nothing of the server before it starts, since `coldpress --help` imports this module.
"""

from __future__ import annotations

import logging
import os
import signal
from contextlib import suppress
from typing import Annotated

import typer

from freezer.cli import (
    ClassOption,
    KeysOption,
    MinVersionOption,
    ModelArgument,
    StoreOption,
    ThreadsOption,
    exiting,
)
from freezer.errors import USAGE, MissingDependencyError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
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
    sentinel: Annotated[
        bool, typer.Option(help="Check some calls with the portable program, by 1% of the CPUs.")
    ] = True,
    max_batch: Annotated[
        int,
        typer.Option(min=0, help="Join waiting requests into calls of up to this size; 0: do not."),
    ] = 0,
    max_delay_ms: Annotated[
        float, typer.Option(min=0.0, help="With --max-batch, how long a request waits for others.")
    ] = 0.0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="PORT", help="Port to listen on.")] = 8000,
) -> None:
    """Serve a frozen model over HTTP, and each new version of it. GET / lists the endpoints, of
    Coldpress and of the open inference protocol (V2).
    """
    with exiting(refused=USAGE):
        try:
            from infra.serving.http_server import http_server
            from infra.serving.model_server import ModelServer, ServingOptions
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"serving needs {error.name}, which is not installed; in the checkout: pip install"
                " --group serving"
            ) from error
    logging.getLogger("coldpress").handlers.clear()  # of `coldpress`, which print without levels
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
        sentinel=sentinel,
        max_batch=max_batch,
        max_delay_ms=max_delay_ms,
    )
    with exiting(refused=USAGE):
        server = ModelServer(options)
    signal.signal(
        signal.SIGTERM, lambda *_: os._exit(0)
    )  # which uvicorn sends again after its shutdown
    with suppress(KeyboardInterrupt):
        http_server(server, host=host, port=port).run()


if __name__ == "__main__":
    app()
