"""HTTP services of infra/serving as processes, requests under load, and artifacts that serve."""

from __future__ import annotations

import asyncio
import io
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import requests
from torch import Tensor

from freezer.artifact import Artifact
from freezer.store import Store
from tests.support import steps
from tests.support.raylets import DIES_WITH_US, LOOPBACK, ROOT, free_port, wait_until
from tests.support.steps import random_inputs, rewritten

X = random_inputs(2, 4)
"""Inputs of `mlp`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What clients saw.

    Attributes:
        seconds: length of the measurement.
        latencies_ms: of the requests that were answered with outputs.
        statuses: number of all requests by HTTP status; 0 for those whose connection broke after
            they were sent.
    """

    seconds: float
    latencies_ms: Sequence[float]
    statuses: Mapping[int, int]


def start_service(model: str, store: str, port: int, *options: str) -> subprocess.Popen[bytes]:
    """Start a service on the loopback address, and wait until it is ready."""
    command = [
        *DIES_WITH_US,
        sys.executable,
        "-m",
        "infra.serving.service",
        model,
        f"--store={store}",
        f"--port={port}",
        *options,
    ]
    process = subprocess.Popen(command, cwd=ROOT)
    wait_until(
        lambda: process.poll() is not None or is_ready(port), f"{shlex.join(command)} is ready"
    )
    return process


def is_ready(port: int) -> bool:
    """Whether a service on this machine is ready."""
    try:
        return requests.get(f"http://{LOOPBACK}:{port}/ready", timeout=5).ok
    except (requests.ConnectionError, requests.Timeout):  # an emulated CPU imports torch for long
        return False


@contextmanager
def running_service(model: str, store: str, *options: str) -> Iterator[str]:
    """The URL of a service that runs until the end of the block."""
    port = free_port()
    process = start_service(model, store, port, *options)
    try:
        yield f"http://{LOOPBACK}:{port}/predict"
    finally:
        process.terminate()
        process.wait(30)


async def load_url(
    url: str,
    body: bytes,
    media_type: str,
    *,
    concurrency: int,
    seconds: float,
    headers: Mapping[str, str] | None = None,
) -> Load:
    """Send requests from several clients, each one after the other, and wait for all answers."""
    sent = {"content-type": media_type, **(headers or {})}
    latencies: list[float] = []
    statuses: dict[int, int] = {}
    deadline = time.perf_counter() + seconds

    async def client(session: aiohttp.ClientSession) -> None:
        while (before := time.perf_counter()) < deadline:
            status = 0
            try:
                async with session.post(url, data=io.BytesIO(body), headers=sent) as answer:
                    await answer.read()
                    status = answer.status
            except aiohttp.ClientConnectorError:  # nothing was sent; the service may come back
                await asyncio.sleep(0.05)
                continue
            except aiohttp.ClientError:
                pass
            statuses[status] = statuses.get(status, 0) + 1
            if status == 200:
                latencies.append((time.perf_counter() - before) * 1e3)

    started = time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as session:
        await asyncio.gather(*(client(session) for _ in range(concurrency)))
    return Load(seconds=time.perf_counter() - started, latencies_ms=latencies, statuses=statuses)


def json_of(tensor: Tensor) -> bytes:
    """The body of a request in JSON."""
    return json.dumps({"x": tensor.tolist()}).encode()


def tensor_of(dtype: str, shape: Sequence[int], size_bytes: int) -> bytes:
    """A .safetensors file with a tensor `x`, of any dtype and shape."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, size_bytes]}
    header = json.dumps({"x": entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size_bytes)


def publish(store: Store, artifact: Artifact) -> None:
    """Publish an artifact as the next version of `mlp`, with the portable one of the latest."""
    carried = store.version("mlp").images_of("portable") if store.versions("mlp") else ()
    source_key = artifact.manifest.verdict
    store.publish("mlp", source_key=source_key, artifacts=[artifact], carried=carried)


def with_golden(artifact: Artifact, folder: Path, *, error: float) -> Artifact:
    """A copy with other golden outputs: the same values but for rounding, or wrong ones."""
    changed = steps.with_golden(artifact, folder, lambda values: values * (1 + 1e-6) + error)
    return rewritten(changed, verdict="kept-eager")
