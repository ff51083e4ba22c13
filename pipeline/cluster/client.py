"""Connect the driver to a Ray cluster, or start a local one.

A local Ray writes a token into its user's home. `ray start --head` then demands it, but drivers and
other nodes send it only with RAY_AUTH_MODE=token. On a mismatch Ray fails after 20 seconds, without
the reason, so the token is checked before.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import ray
from ray.exceptions import AuthenticationError
from ray.job_config import JobConfig

from freezer.checks import CheckRequest, Finding
from freezer.errors import ColdpressError, InfrastructureError, UsageError, first_line
from freezer.hardware import PORTABLE, available_cpus, detect
from pipeline.cluster.head_monitor import CONNECT_S, Head, host_and_port
from pipeline.cluster.ray_cluster import Cluster, classes_of
from pipeline.cluster.working_dir import in_job
from pipeline.records import labels_of


def check_token(address: str) -> None:
    """Connect to the head at `HOST:PORT`, which is known to answer.

    Raises:
        InfrastructureError: the head rejects the token of this process, or demands one.
    """
    # Ray's internal API; errors other than this one are left to ray.init.
    with suppress(ImportError, AttributeError, RuntimeError):
        from ray._private.authentication.authentication_token_setup import (
            ensure_token_if_auth_enabled,
        )
        from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled

        try:
            # Without a token, Ray's C++ code would abort the process.
            ensure_token_if_auth_enabled(create_token_if_missing=False)
            GcsClient(address=address)
        except AuthenticationError as error:
            raise token_rejected(address, error) from error


def token_rejected(address: str, error: AuthenticationError) -> InfrastructureError:
    """Return the error for a cluster that rejects the token of this process, or demands one."""
    reason = error.message.splitlines()[0].rstrip(".")
    mode = os.environ.get("RAY_AUTH_MODE", "not set")
    return InfrastructureError(
        f"Ray at {address} rejects the token ({reason}; RAY_AUTH_MODE is {mode} here); set"
        " RAY_AUTH_MODE=token here, and copy ~/.ray/auth_token from the head to this machine (or"
        " set RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN)",
        code="CP-RAY-TOKEN",
    )


_OBJECT_STORE_BYTES = 100_000_000
"""Size of the object store; tasks exchange paths and figures, never weights."""

LEAVE_S = 10.0
"""Time limit of disconnecting from a cluster whose head is silent."""


@contextmanager
def connect(address: str | None) -> Iterator[Cluster]:
    """Connect to the cluster at `address`, or start a local Ray that ends with the block.

    Args:
        address: `HOST:PORT`, `auto`, or None for a local Ray; inside a Ray job, None means the
            job's cluster.

    Raises:
        UsageError: the address is that of a dashboard, or this process uses Ray already.
        InfrastructureError: the cluster cannot be reached, rejects the token, or this machine has
            not joined it.
    """
    check_address(address)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 distorts timings
    joined = joined_address(address)
    try:
        _start(joined)
    except AuthenticationError as error:
        raise token_rejected(joined or "this machine", error) from error
    except ColdpressError:
        raise
    except Exception as error:  # Ray raises a plain one if a node does not start in time
        what = f"Ray at {joined} cannot be reached"
        remedy = "start it with `ray start --head`, or correct --address"
        if not joined:
            what = "no local Ray starts"
            remedy = "if this machine is busy, try again later"
        raise InfrastructureError(
            f"{what}: {first_line(error)}; {remedy}", code="CP-RAY"
        ) from error
    head = Head(joined if joined and "://" in joined else ray.get_runtime_context().gcs_address)
    with head.watched():
        try:
            yield Cluster(joined=bool(joined), head=head)
        finally:
            _leave(head)


def _start(joined: str | None) -> None:
    """Connect this process, and keep its handler of SIGTERM: Ray's own would end it before anything
    is recorded.
    """
    if ray.is_initialized():
        raise UsageError(
            "this process uses Ray already; call ray.shutdown() first, or run the campaign in"
            " another process"
        )
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if joined:
            _join(joined)
        else:
            _init_local()
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _join(address: str) -> None:
    """Connect to a cluster, after checks that Ray itself would make for minutes."""
    place = host_and_port(address)
    if place is not None:
        socket.create_connection(place, timeout=CONNECT_S).close()
        if "://" not in address:
            _check_raylet(address)
            check_token(address)
    ray.init(
        address=address,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env=_own_code(),
        job_config=_job_config([]),
    )


def _leave(head: Head) -> None:
    """Disconnect. Ray would wait for a silent head, now and again at exit."""
    if not head.is_silent:
        ray.shutdown()
        return
    atexit.unregister(ray.shutdown)
    thread = threading.Thread(target=ray.shutdown, daemon=True)
    thread.start()
    thread.join(LEAVE_S)


def joined_address(address: str | None) -> str | None:
    """The address of the cluster to join, from `address` or RAY_ADDRESS; None for a local Ray."""
    return address or os.environ.get("RAY_ADDRESS") or None


def check_address(address: str | None) -> None:
    """Reject the address of a dashboard, in `address` or RAY_ADDRESS: Ray's job commands take it,
    but a driver cannot.

    Raises:
        UsageError: the address is that of a dashboard.
    """
    given = joined_address(address)
    if given and re.match(r"https?://", given):
        raise UsageError(
            f"the address {given!r} (--address or RAY_ADDRESS) is that of a dashboard, which"
            f" accepts jobs: `coldpress submit CATALOG --address {given}`. To run the campaign from"
            " here, leave it out for a local Ray, or set HOST:6379, the head of a cluster"
        )


def _job_config(folders: Sequence[str]) -> JobConfig:
    """Put folders first in the path of workers, instead of Ray's choice, the current directory,
    whose `pipeline` may be the user's.
    """
    config = JobConfig(_py_driver_sys_path=folders)
    config._runtime_env_has_working_dir = lambda: True
    return config


def _own_code() -> dict[str, list[str]] | None:
    """Return a runtime environment with this Coldpress; a submitted job's working directory
    contains it already.
    """
    if in_job():
        return None
    import freezer
    import pipeline

    return {
        "py_modules": [str(Path(str(package.__file__)).parent) for package in (freezer, pipeline)]
    }


def _check_raylet(address: str) -> None:
    """Check that a raylet runs on this machine: a driver reaches its cluster through one.

    Raises:
        InfrastructureError: none does.
    """
    # Ray before 2.60 has no such function, and its own error arrives after a minute.
    with suppress(ImportError, AttributeError):
        from ray._private.services import find_node_ids

        if not find_node_ids():
            host = address.rpartition(":")[0]
            raise InfrastructureError(
                f"no node of the Ray cluster at {address} runs on this machine, and a driver needs"
                f" one; join the cluster with `ray start --address={address} --num-cpus=0`, or"
                f" submit the campaign with `coldpress submit CATALOG --address"
                f" http://{host}:8265`",
                code="CP-RAY",
            )


def _init_local() -> None:
    num_cpus = available_cpus()
    # Keep an idle worker for each core and class environment: starting one again imports torch.
    os.environ.setdefault("RAY_num_workers_soft_limit", str(2 * num_cpus))
    ray.init(
        address="local",  # otherwise Ray would join the last cluster of this machine
        num_cpus=num_cpus,
        labels=labels_of(detect().classes),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        job_config=_job_config(sys.path[::-1]),
        _node_ip_address="127.0.0.1",
    )


JOIN = (
    "env $(coldpress worker-labels --environment) ray start --address=HEAD:6379"
    " $(coldpress worker-labels)"
)


def check_ray(request: CheckRequest) -> Iterator[Finding]:
    """The installed Ray, and the cluster at the requested address: connect to it as a campaign
    would.
    """
    address = joined_address(request.address)
    version = f"Ray {ray.__version__}"
    if address is None:
        yield Finding(
            check="Ray",
            text=f"{version}; a campaign starts it on this machine (--address checks a cluster)",
        )
        return
    try:
        with connect(address) as cluster:
            nodes = cluster.nodes()
    except ColdpressError as error:
        status = f"ray status --address {shlex.quote(address)}"
        yield Finding(
            check="Ray",
            level="error",
            text=f"{version}: {error.coded}",
            remedy=f"{status}   # if nothing answers: ray start --head --port 6379",
        )
        return
    served = classes_of(nodes)
    text = f"{version}, cluster {address}: {len(nodes)} nodes with CPUs"
    if set(served) <= {PORTABLE}:
        yield Finding(
            check="Ray",
            level="warning",
            text=f"{text}, none of which has the label of a device class",
            remedy=f"{JOIN}   # on each worker",
        )
    else:
        yield Finding(check="Ray", text=f"{text}, for {', '.join(served)}")
