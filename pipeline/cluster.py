"""The cluster: nodes, their device classes, and tasks placed on them. The one file that imports ray.

A node carries one label for each class that it can serve: `coldpress.dev/cpu-x86-64-v3=true`. A task runs under its class's
instruction-set limits, which are in the environment of the Ray worker before anything imports torch. Retries are the driver's
business: Ray's own are off. Which nodes a campaign uses is for fleet.py to say, and what runs on which for placement.py.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from freezer.device_class import DEVICE_CLASSES, PORTABLE, available_threads, detect, device_class
from freezer.errors import InfrastructureError, UsageError
from pipeline.head import CONNECT_S, LOOK_S, Head, host_and_port
from pipeline.policy import kind_of_ray
from pipeline.ray_tls import check_tls

LABEL = "coldpress.dev/"
OBJECT_STORE_BYTES = 100_000_000
"""Tasks exchange paths and figures, never weights: the object store may be small."""


NAMESPACE, BOARD = "coldpress", "campaigns/"
"""Of what campaigns tell each other, in the cluster's key-value table."""

LEAVE_S = 10.0
"""How long it may take to leave a cluster whose head is silent."""

RAYLET_S = 15.0
"""How long a raylet that is being started on this machine may take to appear; Ray looks for one for a minute."""

LOOKED_FOR = re.compile("No node info found|Can't find a `node_ip_address.json` file|This node has an IP address of")
"""What Ray says, in various releases, when it has found no raylet of the cluster on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A live node of the cluster and the device classes that it serves; `portable` is always among them.

    Attributes:
        memory_bytes: that Ray gives out there; None where it gives out none.
        labelled: whether it carries a label of ours at all.
    """

    node_id: str
    num_cpus: int
    classes: tuple[str, ...]
    num_gpus: int = 0
    memory_bytes: int | None = None
    labelled: bool = True


def classes_of(nodes: Collection[Node]) -> tuple[str, ...]:
    """Every class that some of these nodes serve, in the order of DEVICE_CLASSES."""
    found = {name for node in nodes for name in node.classes}
    return tuple(name for name in DEVICE_CLASSES if name in found)


@dataclass(frozen=True, slots=True)
class Handle:
    """A task under way."""

    ref: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A task that ended: its value, or the infrastructure's failure in one sentence.

    Attributes:
        lost: whether its worker or node was lost with it, and not just the task.
        kind: of the failure, in pipeline/policy.py.
    """

    handle: Handle
    value: Any = None
    failure: str | None = None
    lost: bool = False
    kind: str = "infrastructure"


class Cluster:
    """A Ray cluster that this process drives. Make one with `connect`.

    Attributes:
        joined: whether it was there before, and others may use it too; a local Ray is this driver's alone.
        home: id of the node that the driver stands on.
        head: which is asked nothing while it is silent: Ray would wait for it, and then end this process.
    """

    def __init__(self, *, joined: bool, head: Head) -> None:
        self.joined, self.head = joined, head
        self.home: str = ray.get_runtime_context().get_node_id()
        self._nodes: list[Node] = []

    def nodes(self) -> list[Node]:
        """The nodes that live now and have CPUs; while the head is silent, those that it told of last.

        Raises:
            InfrastructureError: the head stays silent.
        """
        if self.head.answers():
            self._nodes = [_node(node) for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        return list(self._nodes)

    def in_use(self, node: Node) -> str:
        """What of a node is taken now, by whomever, and the actors that live there, for people."""
        free, actors = self._free(node)
        if free is None:
            return "what is in use there cannot be told"
        given = {"CPU": node.num_cpus, "GPU": node.num_gpus}
        taken = [f"{total - free.get(name, 0):g} of its {total} {name}s" for name, total in given.items() if total]
        memory = (node.memory_bytes or 0) - free.get("memory", 0)
        if memory > 0 and node.memory_bytes is not None:
            taken.append(f"{memory / 1e9:.1f} of its {node.memory_bytes / 1e9:.1f} GB")
        return f"in use are {' and '.join(taken)}" + (f"; actors there: {', '.join(sorted(actors))}" if actors else "")

    def held(self, node: Node) -> str | None:
        """What keeps a task that asks for all cores of a node from beginning; None where it has begun, or that cannot be told."""
        free = self._free(node)[0] if self.joined else None
        return self.in_use(node) if free and free.get("CPU", 0) > 0 else None

    def _free(self, node: Node) -> tuple[Mapping[str, float] | None, list[str]]:
        """What Ray would give out of a node now, None where that cannot be told; and the classes of the actors that live there."""
        # Ray's own tables: another release may have them elsewhere, and its public ones need the dashboard.
        with _told_by(self.head) as answers, contextlib.suppress(ImportError, AttributeError, KeyError):
            if answers:
                from ray._private import state

                alive = state.actors(actor_state_name="ALIVE").values()
                actors = [one["ActorClassName"].rpartition(".")[2] for one in alive if one["Address"]["NodeID"] == node.node_id]
                return state.available_resources_per_node().get(node.node_id), actors
        return None, []

    def start(
        self,
        function: Callable[..., Any],
        *args: Any,
        name: str,
        device_class_: str,
        node: Node | None = None,
        num_cpus: int = 1,
        memory_bytes: int | None = None,
    ) -> Handle:
        """Start a task on one core, or more, of a CUDA class on one GPU besides.

        Args:
            function: importable on the nodes.
            args: that pickle.
            name: for people who look at Ray.
            device_class_: whose limits it runs under.
            node: to run on; None is any node that serves the class. Where it dies, so does the task.
            num_cpus, memory_bytes: to reserve.
        """
        selector = {} if device_class_ == PORTABLE or node else {f"{LABEL}{device_class_}": "true"}
        num_gpus = 1 if device_class(device_class_).kind == "cuda" else 0
        options = _options(num_cpus=num_cpus, num_gpus=num_gpus, memory_bytes=memory_bytes, node=node, selector=selector)
        return self._submit(function, args, name=name, device_class_=device_class_, options=options)

    def start_alone(
        self,
        function: Callable[..., Any],
        *args: Any,
        name: str,
        device_class_: str,
        node: Node,
        memory_bytes: int | None = None,
    ) -> Handle:
        """Start a task that has a whole node to itself: it is given all cores, so Ray runs nothing beside it but what takes none.

        Args:
            function, args, name, device_class_, node: as of `start`.
            memory_bytes: to reserve: actors that take no core may hold memory there.
        """
        num_gpus = 1 if device_class(device_class_).kind == "cuda" else 0
        options = _options(num_cpus=node.num_cpus, num_gpus=num_gpus, memory_bytes=memory_bytes, node=node)
        return self._submit(function, args, name=name, device_class_=device_class_, options=options)

    def glance(self, function: Callable[..., Any], *args: Any, name: str, device_class_: str, node: Node) -> Handle:
        """Start a task that takes no time and no core, so that it also runs beside a judge; in a worker that the class can use."""
        return self._submit(function, args, name=name, device_class_=device_class_, options=_options(num_cpus=0, node=node))

    def _submit(
        self, function: Callable[..., Any], args: tuple[Any, ...], *, name: str, device_class_: str, options: Mapping[str, Any]
    ) -> Handle:
        while not self.head.answers():
            time.sleep(LOOK_S)
        environ = {**device_class(device_class_).limits, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        remote = _remote(function).options(max_retries=0, name=name, runtime_env={"env_vars": environ}, **options)
        return Handle(remote.remote(*args))

    def wait(self, handles: Sequence[Handle], timeout_s: float) -> list[Done]:
        """The tasks that have ended, after at most `timeout_s` seconds."""
        by_ref = {handle.ref: handle for handle in handles}
        ended, others = ray.wait(list(by_ref), num_returns=1, timeout=timeout_s)
        if ended and others:
            ended += ray.wait(others, num_returns=len(others), timeout=0)[0]
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
            return Done(handle=handle, failure=f"{type(error.cause).__name__}: {error.cause}", kind=kind_of_ray(error, error.cause))
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [""]
            return Done(handle=handle, failure=f"{type(error).__name__}: {lines[0]}", kind=kind_of_ray(error), lost=True)

    def cancel(self, handles: Sequence[Handle], *, grace_s: float = 5.0) -> None:
        """Stop tasks: they are interrupted, which ends their children, and killed if that takes longer than `grace_s`."""
        if not handles or self.head.is_silent:
            return
        for handle in handles:
            ray.cancel(handle.ref, force=False)
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
        UsageError: the address is that of a dashboard.
        InfrastructureError: the cluster cannot be reached, or this machine has not joined it.
    """
    check_address(address)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray runs workers at nice 15, which is no way to time anything
    joined = address or os.environ.get("RAY_ADDRESS")
    try:
        if joined:
            _check_answers(joined)
            _check_raylet(joined)
            ray.init(address=joined, log_to_driver=False, logging_level=logging.ERROR, runtime_env=_own_code())
        else:
            _init_local()
    except (OSError, RuntimeError, ValueError) as error:
        if joined and LOOKED_FOR.search(f"{error} {error.__cause__}"):
            raise _no_raylet(joined) from error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InfrastructureError(
            f"Ray at {joined or 'this machine'} cannot be reached: {lines[0]}; start it with `ray start --head`, or mend --address",
            code="CP-RAY",
        ) from error
    head = Head(joined if joined and "://" in joined else ray.get_runtime_context().gcs_address)
    with head.watched():
        try:
            yield Cluster(joined=bool(joined), head=head)
        finally:
            _leave(head)


def check_address(address: str | None) -> None:
    """Refuse the address of a dashboard: Ray's own commands for jobs take it, from RAY_ADDRESS too, and a driver cannot.

    Args:
        address: as of `connect`.

    Raises:
        UsageError: it is one.
    """
    found = address or os.environ.get("RAY_ADDRESS", "")
    if not re.match(r"https?://", found):
        return
    what, other = ("--address", "leave it out") if address else ("RAY_ADDRESS", "unset it")
    raise UsageError(
        f"{what} {found!r} is that of a dashboard, which takes jobs: `python -m jobs.submit CATALOG --address {found}`. To run the "
        f"campaign from here, {other} for a local Ray, or name the head of a cluster with --address HOST:6379"
    )


def _leave(head: Head) -> None:
    """Leave the cluster. A silent head would be waited for: a thread does that, and Ray's own farewell at exit is left out."""
    if not head.is_silent:
        ray.shutdown()
        return
    atexit.unregister(ray.shutdown)
    thread = threading.Thread(target=ray.shutdown, daemon=True)
    thread.start()
    thread.join(LEAVE_S)


@lru_cache(maxsize=16)
def _remote(function: Callable[..., Any]) -> Any:
    """Ray's form of a function: made once, since Ray sends the code of each to the cluster."""
    return ray.remote(function)


def _own_code() -> dict[str, Any] | None:
    """The runtime environment that brings this Coldpress to the nodes; a submitted job's working directory has it already."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return None
    import freezer
    import pipeline

    return {"py_modules": [str(Path(str(package.__file__)).parent) for package in (freezer, pipeline)]}


def _check_answers(address: str) -> None:
    """Fail at once where nothing listens, or does not speak TLS as this process does: Ray itself tries for minutes.

    Raises:
        OSError: nothing answers at the address.
        InfrastructureError: TLS is wrong.
    """
    place = host_and_port(address)
    if place is not None:
        check_tls(*place, limit_s=CONNECT_S)


def _check_raylet(address: str) -> None:
    """Fail where no raylet appears on this machine: a driver reaches its cluster through one.

    Raises:
        InfrastructureError: there is none.
    """
    if "://" in address or host_and_port(address) is None:
        return
    # Releases that have it find the driver's node by it alone (2.60); of others (2.49, 2.53) Ray's own error is told, later.
    with contextlib.suppress(ImportError, AttributeError):
        from ray._private.services import find_node_ids

        deadline = time.monotonic() + RAYLET_S
        while not find_node_ids():
            if time.monotonic() >= deadline:
                raise _no_raylet(address)
            time.sleep(LOOK_S / 2)


def _no_raylet(address: str) -> InfrastructureError:
    place = host_and_port(address)
    host, head = (f"[{place[0]}]" if ":" in place[0] else place[0], address) if place else ("HEAD", "HEAD:6379")
    return InfrastructureError(
        f"no node of the Ray cluster at {address} runs on this machine, and a driver needs one; join it here with `ray start "
        f"--address={head} --num-cpus=0`, or submit the campaign with `python -m jobs.submit CATALOG --address http://{host}:8265`",
        code="CP-RAY",
    )


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


def _node(found: Mapping[str, Any]) -> Node:
    labels, resources = found.get("Labels", {}), found["Resources"]
    classes = [name for name in DEVICE_CLASSES if labels.get(f"{LABEL}{name}") == "true" and name != PORTABLE]
    return Node(
        node_id=found["NodeID"],
        num_cpus=int(resources["CPU"]),
        classes=(*classes, PORTABLE),
        num_gpus=int(resources.get("GPU", 0)),
        memory_bytes=int(resources["memory"]) if "memory" in resources else None,
        labelled=any(name.startswith(LABEL) for name in labels),
    )


def _options(
    *,
    num_cpus: int,
    num_gpus: int = 0,
    memory_bytes: int | None = None,
    node: Node | None = None,
    selector: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What Ray is asked for. A task that is bound to a node by its id fails when the node is dead; by a label it would wait."""
    options: dict[str, Any] = {"num_cpus": num_cpus}
    if num_gpus:
        options["num_gpus"] = num_gpus
    if memory_bytes is not None:
        options["memory"] = memory_bytes
    if node is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    elif selector:
        options["label_selector"] = dict(selector)
    return options


class ClusterBoard:
    """A board (turns.py) in the key-value table of the cluster's head. While the head does not answer, it is empty.

    Args:
        head: of the cluster.
    """

    def __init__(self, head: Head) -> None:
        self._head = head

    def read(self, *, besides: str) -> Mapping[str, str]:
        """All of it but one row.

        Raises:
            InfrastructureError: the head stays silent.
        """
        rows: dict[str, str] = {}
        with _told_by(self._head) as answers:
            for key in internal_kv._internal_kv_list(BOARD, namespace=NAMESPACE) if answers else ():
                name = key.decode().removeprefix(BOARD)
                value = None if name == besides else internal_kv._internal_kv_get(key, namespace=NAMESPACE)
                if value is not None:
                    rows[name] = value.decode()
        return rows

    def write(self, key: str, value: str) -> None:
        """Set one row."""
        with _told_by(self._head) as answers:
            if answers:
                internal_kv._internal_kv_put(f"{BOARD}{key}", value, overwrite=True, namespace=NAMESPACE)

    def erase(self, key: str) -> None:
        """Remove one row; it need not be there."""
        if not self._head.is_silent:
            with contextlib.suppress(RuntimeError, OSError, ray.exceptions.RayError):
                internal_kv._internal_kv_del(f"{BOARD}{key}", namespace=NAMESPACE)


@contextlib.contextmanager
def _told_by(head: Head) -> Iterator[bool]:
    """Whether the head can be asked; what it says wrong of its table is no loss."""
    answers = head.answers()
    with contextlib.suppress(RuntimeError, OSError, ray.exceptions.RayError):
        yield answers
