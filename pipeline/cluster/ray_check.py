"""Ray as `coldpress doctor` finds it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import ray

from freezer.checks import CheckRequest, Finding
from freezer.errors import ColdpressError, UsageError
from freezer.hardware import PORTABLE
from pipeline.cluster.client import connect, joined_address
from pipeline.cluster.ray_cluster import classes_of

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
    except UsageError as error:
        remedy = (
            "coldpress doctor --address HEAD:6379   # without it, a campaign starts Ray on this"
            " machine"
        )
        yield Finding(check="Ray", level="error", text=error.coded, remedy=remedy)
        return
    except ColdpressError as error:
        remedy = (
            f"ray status --address {shlex.quote(address)}   # if nothing answers: ray start --head"
            " --port 6379"
        )
        yield Finding(check="Ray", level="error", text=f"{version}: {error.coded}", remedy=remedy)
        return
    served = classes_of(nodes)
    text = (
        f"{version}, cluster {address}: {len(nodes)} node{'' if len(nodes) == 1 else 's'} with CPUs"
    )
    if set(served) <= {PORTABLE}:
        text = f"{text}, none of which has the label of a device class"
        yield Finding(check="Ray", level="warning", text=text, remedy=f"{JOIN}   # on each worker")
        return
    yield Finding(check="Ray", text=f"{text}, for {', '.join(served)}")
