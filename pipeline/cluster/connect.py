"""Connect the driver to a Ray cluster, or start a local one."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from freezer.errors import InfrastructureError, UsageError, first_line
from freezer.hardware.cgroups import available_cpus
from freezer.hardware.machine import detect
from pipeline.cluster.head_monitor import CONNECT_S, LOOK_S, Head, host_and_port
from pipeline.cluster.nodes import LABEL
from pipeline.cluster.ray_cluster import Cluster
from pipeline.cluster.tls import check_tls

OBJECT_STORE_BYTES = 100_000_000
"""Tasks exchange paths and figures, never weights: the object store may be small."""

LEAVE_S = 10.0
"""How long it may take to leave a cluster whose head is silent."""

RAYLET_S = 15.0
"""How long a raylet that is being started on this machine may take to appear; Ray looks for one for a minute."""

LOOKED_FOR = re.compile("No node info found|Can't find a `node_ip_address.json` file|This node has an IP address of")
"""What Ray says, in various releases, when it has found no raylet of the cluster on this machine."""


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
        raise InfrastructureError(
            f"Ray at {joined or 'this machine'} cannot be reached: {first_line(error)}; "
            f"start it with `ray start --head`, or mend --address",
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
    num_cpus = available_cpus()
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
