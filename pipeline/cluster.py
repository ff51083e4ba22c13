"""The cluster: nodes, their device classes, and tasks placed on them. The one file that imports ray.

A node carries one label for each class that it can serve: `coldpress.dev/cpu-x86-64-v3=true`. A task runs under its class's
instruction-set limits, which are in the environment of the Ray worker before anything imports torch. Retries are the driver's
business: Ray's own are off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray

from freezer.device_class import DEVICE_CLASSES, PORTABLE, available_threads, detect, device_class
from freezer.errors import InfrastructureError

LABEL = "coldpress.dev/"
OBJECT_STORE_BYTES = 100_000_000
"""Tasks exchange paths and figures, never weights: the object store may be small."""


PROBE_S = 5.0
"""How long a cluster's first sign of life may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A live node of the cluster and the device classes that it serves; `portable` is always among them."""

    node_id: str
    num_cpus: int
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Handle:
    """A task under way."""

    ref: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A task that ended: its value, or the infrastructure's failure in one sentence."""

    handle: Handle
    value: Any = None
    failure: str | None = None


class Cluster:
    """A Ray cluster that this process drives. Make one with `connect`."""

    def __init__(self, nodes: Sequence[Node], *, joined: bool = False) -> None:
        self.nodes = tuple(nodes)
        self._joined = joined

    @property
    def classes(self) -> tuple[str, ...]:
        """Every class that some node serves."""
        found = {name for node in self.nodes for name in node.classes}
        return tuple(name for name in DEVICE_CLASSES if name in found)

    def num_threads(self, name: str) -> int:
        """The thread count to build class `name` for: the cores of its smallest node."""
        return min(node.num_cpus for node in self.nodes if name in node.classes)

    def num_cpus(self) -> int:
        """Cores of all nodes."""
        return sum(node.num_cpus for node in self.nodes)

    def blind_to(self, path: Path) -> list[Node]:
        """The nodes that do not see a file or folder of this machine as it is here. A local Ray sees all."""
        if not self._joined:
            return []

        def look(name: str) -> tuple[int, int] | None:  # travels by value: a node may not have this module yet
            from pathlib import Path

            try:
                found = Path(name).stat()
            except OSError:
                return None
            return found.st_size, found.st_mtime_ns

        name = str(path.absolute())
        looks = [
            ray.remote(look)
            .options(num_cpus=0, max_retries=0, name="look", label_selector={"ray.io/node-id": node.node_id})
            .remote(name)
            for node in self.nodes
        ]
        here = look(name)
        return [node for node, seen in zip(self.nodes, looks, strict=True) if self.result(Handle(seen)) != here]

    def start(self, function: Callable[..., Any], *args: Any, name: str, device_class_: str) -> Handle:
        """Start a task on one core of any node that serves the class."""
        selector = {} if device_class_ == PORTABLE else {f"{LABEL}{device_class_}": "true"}
        return self._submit(function, args, name=name, device_class_=device_class_, selector=selector, num_cpus=1)

    def start_alone(self, function: Callable[..., Any], *args: Any, name: str, device_class_: str, node: Node) -> Handle:
        """Start a task that has a whole node to itself: it is given all cores, so Ray runs nothing beside it."""
        selector = {"ray.io/node-id": node.node_id}
        return self._submit(function, args, name=name, device_class_=device_class_, selector=selector, num_cpus=node.num_cpus)

    def _submit(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        name: str,
        device_class_: str,
        selector: Mapping[str, str],
        num_cpus: int,
    ) -> Handle:
        environ = {**device_class(device_class_).limits, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        options = {
            "num_cpus": num_cpus,
            "max_retries": 0,
            "name": name,
            "runtime_env": {"env_vars": environ},
            **({"label_selector": dict(selector)} if selector else {}),
        }
        return Handle(ray.remote(function).options(**options).remote(*args))

    def wait(self, handles: Sequence[Handle], timeout_s: float) -> list[Done]:
        """The tasks that have ended, after at most `timeout_s` seconds."""
        by_ref = {handle.ref: handle for handle in handles}
        ended, _ = ray.wait(list(by_ref), num_returns=1, timeout=timeout_s)
        return [self._done(by_ref[ref]) for ref in ended]

    def result(self, handle: Handle) -> Any:
        """The value of a task.

        Raises:
            InfrastructureError: it, its worker or its node died.
        """
        done = self._done(handle)
        if done.failure is not None:
            raise InfrastructureError(done.failure)
        return done.value

    def _done(self, handle: Handle) -> Done:
        try:
            return Done(handle=handle, value=ray.get(handle.ref))
        except ray.exceptions.RayTaskError as error:
            return Done(handle=handle, failure=f"{type(error.cause).__name__}: {error.cause}")
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [""]
            return Done(handle=handle, failure=f"{type(error).__name__}: {lines[0]}")

    def cancel(self, handles: Sequence[Handle], *, grace_s: float = 5.0) -> None:
        """Stop tasks: they are interrupted, which ends their children, and killed if that takes longer than `grace_s`."""
        for handle in handles:
            ray.cancel(handle.ref, force=False)
        if not handles:
            return
        _, alive = ray.wait([handle.ref for handle in handles], num_returns=len(handles), timeout=grace_s)
        for ref in alive:
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                ray.cancel(ref, force=True)


@contextlib.contextmanager
def connect(address: str | None) -> Iterator[Cluster]:
    """A cluster for the length of a campaign: the one at `address`, or a local Ray that ends with it.

    Args:
        address: `HOST:PORT`, `auto`, or None for a local Ray. Inside a Ray job, the job's own cluster is taken.

    Raises:
        InfrastructureError: the cluster cannot be reached, or none of its nodes carries a label.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray runs workers at nice 15, which is no way to time anything
    joined = address or os.environ.get("RAY_ADDRESS")
    try:
        if joined:
            _check_answers(joined)
            ray.init(address=joined, log_to_driver=False, logging_level=logging.ERROR, runtime_env=_own_code())
        else:
            _init_local()
    except (OSError, RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InfrastructureError(
            f"Ray at {joined or 'this machine'} cannot be reached: {lines[0]}; start it with `ray start --head`, or mend --address",
            code="CP-RAY",
        ) from error
    try:
        yield Cluster(_nodes(), joined=bool(joined))
    finally:
        ray.shutdown()


def _own_code() -> dict[str, Any] | None:
    """The runtime environment that brings this Coldpress to the nodes; a submitted job's working directory has it already."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return None
    import freezer
    import pipeline

    return {"py_modules": [str(Path(str(package.__file__)).parent) for package in (freezer, pipeline)]}


def _check_answers(address: str) -> None:
    """Fail at once where nothing listens: Ray itself tries for minutes.

    Raises:
        OSError: nothing answers at the address.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        with socket.create_connection((host, int(port)), timeout=PROBE_S):
            pass


def _init_local() -> None:
    num_cpus = available_threads()
    # Keep a worker for each core and class environment: Ray would end the idle ones, and each has a torch imported to lose.
    os.environ.setdefault("RAY_num_workers_soft_limit", str(2 * num_cpus))
    ray.init(
        address="local",  # without it Ray would join whatever cluster this machine was last seen with
        num_cpus=num_cpus,
        labels={f"{LABEL}{name}": "true" for name in detect().classes},
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )


def _nodes() -> list[Node]:
    found, labelled = [], False
    for node in ray.nodes():
        labels, num_cpus = node.get("Labels", {}), int(node["Resources"].get("CPU", 0))
        classes = [name for name in DEVICE_CLASSES if labels.get(f"{LABEL}{name}") == "true" and name != PORTABLE]
        if node["Alive"] and num_cpus > 0:
            labelled = labelled or any(name.startswith(LABEL) for name in labels)
            found.append(Node(node_id=node["NodeID"], num_cpus=num_cpus, classes=(*classes, PORTABLE)))
    if not found:
        raise InfrastructureError("the cluster has no node with a CPU; start workers with `ray start`", code="CP-RAY")
    if not labelled:
        raise InfrastructureError(
            "no node of the cluster carries a label coldpress.dev/<device class>; start workers with "
            f"`ray start --labels=coldpress.dev/{next((c for c in detect().classes if c != PORTABLE), 'cpu-x86-64-v3')}=true`",
            code="CP-NO-NODE",
        )
    return found
