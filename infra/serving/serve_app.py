"""An application of Ray Serve: one model, a deployment for each device class, and a router before
them.

    serve run infra/serving/serve.yaml

A replica runs on a node that has the label of its class (`coldpress worker-labels` prints
them), pulls that class's artifact from the store, and starts only if the canary passes. The router
gives each request to a class, in proportion to the replicas. POST is answered as by service.py; GET
returns the contract of the artifact that the router happens to choose.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from freezer.hardware import PORTABLE, can_run, device_class
from infra.serving.bodies import refusal
from infra.serving.model_server import KEY, ModelServer, ServingOptions

LABEL = "coldpress.dev/"
"""Prefix of the labels of nodes."""


class Arguments(BaseModel):
    """Arguments of the application, in `args` of serve.yaml.

    Attributes:
        model, store, min_version, keys, queue, reload_s, max_batch, max_delay_ms: see
            ServingOptions; `queue` is for each class.
        replicas: number of replicas by device class.
        threads: CPUs of a replica, which its calls use.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    store: str
    replicas: dict[str, int] = Field(min_length=1)
    threads: int = 1
    min_version: int = 0
    keys: tuple[Path, ...] = ()
    queue: int = 32
    reload_s: float = 30.0
    max_batch: int = 0
    max_delay_ms: float = 0.0


class Replica:
    """A ModelServer in an actor of Ray.

    Raises:
        RuntimeError: the model cannot be loaded; Ray starts another replica.
    """

    def __init__(self, options: ServingOptions) -> None:
        self._server = ModelServer(options)
        self._server.refresh()
        if self._server.loaded is None:
            raise RuntimeError(self._server.problem)
        self._watching = asyncio.get_running_loop().create_task(self._server.watch())

    async def answer(self, body: bytes, media_type: str, key: str | None = None) -> Response:
        """See ModelServer."""

        async def chunks() -> AsyncIterator[bytes]:
            yield body

        return await self._server.answer(chunks(), media_type, key)

    async def contract(self) -> Response:
        """See ModelServer."""
        return self._server.contract()


class Router:
    """Passes requests on to the deployments of the classes.

    Args:
        weights: share of each deployment.
        deployments: in the same order.
    """

    def __init__(self, weights: list[int], *deployments: DeploymentHandle) -> None:
        self._weights, self._deployments = weights, deployments

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        (chosen,) = random.choices(self._deployments, self._weights)
        try:
            if request.method == "GET":
                found: Response = await chosen.contract.remote()
            else:
                headers = request.headers
                found = await chosen.answer.remote(
                    await request.body(), headers.get("content-type", ""), headers.get(KEY)
                )
        except BackPressureError:
            return refusal(503, "too many requests are waiting")
        return found


def build(arguments: Arguments) -> serve.Application:
    """The application; Ray Serve calls this with the `args` of serve.yaml.

    Raises:
        UsageError: a device class is unknown.
    """
    shared = arguments.model_dump(exclude={"replicas"})
    deployments = [
        serve.deployment(
            Replica,
            name=name,
            num_replicas=count,
            # At least 8: Ray's router waits longer and longer for replicas that are full.
            max_ongoing_requests=max(arguments.max_batch + 1, 8),
            max_queued_requests=arguments.queue,
            graceful_shutdown_timeout_s=60,
            ray_actor_options=placement(name, arguments.replicas) | {"num_cpus": arguments.threads},
        ).bind(ServingOptions(**shared, device_class=name))
        for name, count in arguments.replicas.items()
    ]
    router = serve.deployment(
        Router, name="router", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}
    )
    return router.bind(list(arguments.replicas.values()), *deployments)


def placement(name: str, listed: Collection[str]) -> dict[str, Any]:
    """Ray's options that place a class on nodes that have it, and none of the better classes that
    are listed.

    Raises:
        UsageError: the class is unknown.
    """
    better = [other for other in listed if other != name and can_run(name, other)]
    own = {} if name == PORTABLE else {f"{LABEL}{name}": "true"}
    return {
        "label_selector": own | {f"{LABEL}{other}": "!true" for other in better},
        "num_gpus": 1 if device_class(name).kind == "cuda" else 0,
    }
