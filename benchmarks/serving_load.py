"""Requests per second and latencies of infra/serving under load, beside calls of the model in the
process.

    python -m benchmarks.serving_load [--models small,mobilenetv3-large] [--concurrency 1,4,16]
    [--servers service,batching,native,ray] [--seconds 10] [--out FILE]

First each model is frozen for one thread and its batches, into a store that `--work` keeps for the
next run. Then clients, all in this process and on connections that stay open, send one request
after the other, in each form: to the service, to one that joins requests, to one without torch, and
to Ray Serve. They need CPU time of the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import children
from benchmarks.pages import ROOT, machine, markdown_table, results_page, today
from freezer.files import write_whole
from freezer.spec import Dim
from freezer.store import Store
from infra.serving.bodies import BINARY, JSON
from infra.serving.open_inference import HEADER
from tests.support.raylets import LOOPBACK, free_port
from tests.support.services import Load, load_url, running_service

WORK = ROOT / ".bench" / "serving"
QUEUE = 64
WARM_UP_S = 1.0

SERVERS: Mapping[str, tuple[str, ...]] = {
    "service": (),
    "batching": ("--max-batch", "16"),
    "native": ("--runtime", "native"),
}
"""Options of each service; `ray` is Ray Serve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A model to serve.

    Attributes:
        factory: `module:function`, which makes it.
        name, shape: of its one input, of float32.
        max_batch: largest size of its first dim.
    """

    factory: str
    name: str
    shape: tuple[int, ...]
    max_batch: int


MODELS: Mapping[str, ServedModel] = {
    "small": ServedModel(
        factory="benchmarks.serving_load:small", name="input", shape=(1, 64), max_batch=16
    ),
    "mobilenetv3-large": ServedModel(
        factory="benchmarks.peer_models:mobilenet_v3_large",
        name="image",
        shape=(1, 3, 224, 224),
        max_batch=8,
    ),
}


def cells_of(load: Load) -> list[str]:
    """Requests per second, percentiles and refused requests."""
    if not load.latencies_ms:
        return ["0", "", "", "", str(sum(load.statuses.values()))]
    percentiles = [f"{value:.3g}" for value in np.percentile(load.latencies_ms, (50, 95, 99))]
    refused = sum(load.statuses.values()) - len(load.latencies_ms)
    return [f"{len(load.latencies_ms) / load.seconds:.0f}", *percentiles, str(refused)]


def small() -> Any:
    """A perceptron of 64 inputs and 10 outputs, whose calls take much less time than a request."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    ).eval()


def prepare(job: Mapping[str, Any]) -> dict[str, Any]:
    """Freeze a model for one thread and publish it."""
    import torch

    import freezer

    model = MODELS[job["model"]]
    module_name, function = model.factory.split(":")
    source = getattr(importlib.import_module(module_name), function)()
    options = freezer.FreezeOptions(
        name=job["model"],
        recipes=["inductor-frozen"],
        num_threads=1,
        limits=freezer.Limits(speedup_min=0.0),
        policy=freezer.SamplingPolicy(
            time_limit_s=1.0, warmup_s=0.1, min_rounds=1, busy_limit=2.0, steal_limit=2.0
        ),
    )
    out = Path(job["work"]) / job["model"]
    batch = Dim(name="batch", min=1, max=model.max_batch)
    result = freezer.freeze(
        source,
        {model.name: torch.randn(model.shape)},
        out=out,
        dims={model.name: {0: batch}},
        options=options,
    )
    if result.artifact is None:
        raise RuntimeError(f"{job['model']}: {result.reason} {result.failures}")
    Store.open(str(Path(job["work"]) / "store"), create=True).publish(
        job["model"], source_key="benchmark", artifacts=[result.artifact]
    )
    return {}


def call_directly(job: Mapping[str, Any]) -> dict[str, Any]:
    """Call a model in this process, one call after the other."""
    import torch

    import freezer

    model, given = (
        freezer.load(job["model"], store=job["store"], threads=1),
        torch.randn(MODELS[job["model"]].shape),
    )
    latencies = []
    started = time.perf_counter()
    while time.perf_counter() < started + job["seconds"]:
        before = time.perf_counter()
        model(given)
        latencies.append((time.perf_counter() - before) * 1e3)
    return {
        "cells": cells_of(
            Load(
                seconds=time.perf_counter() - started,
                latencies_ms=latencies,
                statuses={200: len(latencies)},
            )
        )
    }


def load_ray_serve(job: Mapping[str, Any]) -> dict[str, Any]:
    """Start Ray with the application on this machine, and load it."""
    import ray
    from ray import serve

    from infra.serving.serve_app import LABEL, Arguments, build

    (name,), port = Store.open(job["store"]).version(job["model"]).images, free_port()
    ray.init(num_cpus=2, labels={f"{LABEL}{name}": "true"}, log_to_driver=False)
    serve.start(http_options={"host": LOOPBACK, "port": port})
    arguments = Arguments(model=job["model"], store=job["store"], replicas={name: 1}, queue=QUEUE)
    serve.run(build(arguments), route_prefix="/predict")
    rows = []
    for form, number, load in _loads(job, f"http://{LOOPBACK}:{port}", OWN_FORMS):
        rows.append([form, number, cells_of(load)])
    serve.shutdown()
    ray.shutdown()
    return {"rows": rows}


JOBS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "prepare": prepare,
    "direct": call_directly,
    "ray": load_ray_serve,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request.

    Attributes:
        path: below the address of the server.
        headers: without its content type.
    """

    path: str
    body: bytes
    media_type: str
    headers: Mapping[str, str] = field(default_factory=dict)


def _own_json(model: str, name: str, array: Any) -> Request:
    body = json.dumps({name: array.tolist()}).encode()
    return Request(path="/predict", body=body, media_type=JSON)


def _own_binary(model: str, name: str, array: Any) -> Request:
    from safetensors.numpy import save

    return Request(path="/predict", body=bytes(save({name: array})), media_type=BINARY)


def _open_json(model: str, name: str, array: Any) -> Request:
    item = {"name": name, "shape": array.shape, "datatype": "FP32", "data": array.ravel().tolist()}
    body = json.dumps({"inputs": [item]}).encode()
    return Request(path=f"/v2/models/{model}/infer", body=body, media_type=JSON)


def _open_binary(model: str, name: str, array: Any) -> Request:
    data = array.tobytes()
    item = {"name": name, "shape": array.shape, "datatype": "FP32"}
    sized = {**item, "parameters": {"binary_data_size": len(data)}}
    wanted = {"parameters": {"binary_data_output": True}}
    header = json.dumps({"inputs": [sized], **wanted}).encode()
    return Request(
        path=f"/v2/models/{model}/infer",
        body=header + data,
        media_type=BINARY,
        headers={HEADER: str(len(header))},
    )


RequestForm = Callable[[str, str, Any], Request]

OWN_FORMS: Mapping[str, RequestForm] = {"JSON": _own_json, ".safetensors": _own_binary}
FORMS: Mapping[str, RequestForm] = {
    **OWN_FORMS,
    "V2 JSON": _open_json,
    "V2 binary": _open_binary,
}
"""Requests of each form, from names of model and input, and the input."""


def _loads(
    job: Mapping[str, Any], address: str, forms: Mapping[str, RequestForm]
) -> Iterator[tuple[str, int, Load]]:
    """A measurement for each form and concurrency."""
    model = MODELS[job["model"]]
    array = np.random.default_rng(0).standard_normal(model.shape).astype(np.float32)
    for form, made in forms.items():
        request = made(job["model"], model.name, array)

        def measured(number: int, seconds: float, request: Request = request) -> Load:
            loading = load_url(
                address + request.path,
                request.body,
                request.media_type,
                concurrency=number,
                seconds=seconds,
                headers=request.headers,
            )
            return asyncio.run(loading)

        for number in job["concurrency"]:
            measured(number, WARM_UP_S)
            yield form, number, measured(number, job["seconds"])


def main() -> None:
    """Freeze, serve, load, and write the page."""
    given = _arguments()
    pages: list[str] = []
    for name in given.models.split(","):
        _prepared(given.work, name)
        job = {
            "model": name,
            "store": str(given.work / "store"),
            "seconds": given.seconds,
            "concurrency": [int(number) for number in given.concurrency.split(",")],
        }
        direct = children.finish(children.start("serving_load", {"do": "direct", **job}))
        rows = [["in the process", "", "1", *direct["cells"]]]
        for server in given.servers.split(","):
            for form, number, cells in _rows_of(server, job):
                rows.append([server, form, str(number), *cells])
        sizes = ", ".join(str(size) for size in MODELS[name].shape)
        pages += ["", f"## {name}, float32 [{sizes}]", ""]
        pages += markdown_table(
            ["", "form", "clients", "requests/s", "p50 ms", "p95 ms", "p99 ms", "refused"], rows
        )
    text = "\n".join([*_head(given.seconds), *pages]) + "\n"
    out = given.out or results_page("serving")
    write_whole(out, text.encode())
    print(text)
    print(f"wrote {out}", file=sys.stderr)


def _rows_of(server: str, job: Mapping[str, Any]) -> list[Any]:
    """Form, number of clients and figures of each measurement of a server."""
    if server == "ray":
        found: list[Any] = children.finish(children.start("serving_load", {"do": "ray", **job}))[
            "rows"
        ]
        return found
    options = ("--threads", "1", "--queue", str(QUEUE), *SERVERS[server])
    with running_service(job["model"], job["store"], *options) as url:
        address = url.removesuffix("/predict")
        measured = list(_loads(job, address, FORMS))
    return [[form, number, cells_of(load)] for form, number, load in measured]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving_load", description="Load the HTTP services."
    )
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument(
        "--concurrency", default="1,4,16", help="numbers of clients, separated by commas"
    )
    parser.add_argument(
        "--servers",
        default=",".join((*SERVERS, "ray")),
        help="separated by commas",
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measurement")
    parser.add_argument(
        "--work", type=lambda text: Path(text).absolute(), default=WORK, help="folder for the store"
    )
    parser.add_argument("--out", type=Path, help="Markdown file; default: in benchmarks/results")
    return parser.parse_args()


def _prepared(work: Path, name: str) -> None:
    """Freeze and publish a model, unless an earlier run has."""
    if not (work / "store" / name).exists():
        work.mkdir(parents=True, exist_ok=True)
        children.finish(
            children.start("serving_load", {"do": "prepare", "model": name, "work": str(work)})
        )


def _head(seconds: float) -> list[str]:
    from importlib.metadata import version

    batches = " and ".join(f"{model.max_batch} ({name})" for name, model in MODELS.items())
    packages = ("fastapi", "uvicorn", "httptools", "uvloop", "aiohttp")
    return [
        f"# Serving under load, {today()}",
        *("", f"`{shlex.join(['python', '-m', 'benchmarks.serving_load', *sys.argv[1:]])}`", ""),
        *machine(),
        f"- {', '.join(f'{name} {version(name)}' for name in packages)}",
        "",
        (
            f"{seconds:g} s for each row, after {WARM_UP_S:g} s. Artifacts of Inductor for one"
            f" thread and batches to {batches}. One process serves, one call at a time, and up to"
            f" {QUEUE} requests wait; `batching` has `{shlex.join(SERVERS['batching'])}`, `native`"
            f" `{shlex.join(SERVERS['native'])}`. The clients run on the same machine and need CPU"
            " time of it."
        ),
    ]


if __name__ == "__main__":
    main()
