"""A node provider for Ray's autoscaler whose machines are raylets on this machine.

Ray loads `LocalMachines` in the autoscaler's process, by the name in `provider.module` of the
cluster's file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import NODE_KIND_HEAD, TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

from tests.support.raylets import DIES_WITH_US, LOOPBACK

HEAD = "head"


def write_settings(
    folder: Path, address: str, types: Mapping[str, Mapping[str, Any]], *, idle_minutes: float
) -> Path:
    """Write a file for `ray start --autoscaling-config`.

    Args:
        folder: for the file, and the log of each machine.
        address: of the head.
        types: of machines: `resources`, `labels` and `max_workers` of each.
        idle_minutes: after which an idle machine is ended.
    """
    path = folder / "autoscaler.json"
    head = {"resources": {}, "node_config": {}, "max_workers": 0}
    stages = (
        "initialization",
        "setup",
        "head_setup",
        "worker_setup",
        "head_start_ray",
        "worker_start_ray",
    )
    settings = {
        "cluster_name": "local",
        "max_workers": sum(given["max_workers"] for given in types.values()),
        "idle_timeout_minutes": idle_minutes,
        "provider": {
            "type": "external",
            "module": f"{__name__}.{LocalMachines.__name__}",
            "address": address,
            "folder": str(folder),
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {},
        "file_mounts": {},
        **{f"{stage}_commands": [] for stage in stages},
        "cluster_synced_files": [],
        "head_node_type": HEAD,
        "available_node_types": {HEAD: head}
        | {name: {"node_config": {}, **given} for name, given in types.items()},
    }
    path.write_text(json.dumps(settings))
    return path


def identity(instance: str, node_type: str) -> dict[str, str]:
    """The environment that names a raylet as one of the autoscaler's machines."""
    return {"RAY_CLOUD_INSTANCE_ID": instance, "RAY_NODE_TYPE_NAME": node_type}


class LocalMachines(NodeProvider):  # type: ignore[misc]
    """See the module."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._lock = threading.Lock()
        self._tags: dict[str, dict[str, str]] = {
            HEAD: {TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_USER_NODE_TYPE: HEAD}
        }
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def create_node_with_resources_and_labels(
        self,
        node_config: Mapping[str, Any],
        tags: Mapping[str, str],
        count: int,
        resources: Mapping[str, float],
        labels: Mapping[str, str],
    ) -> None:
        """Start some machines of one type."""
        command = [
            *(
                *DIES_WITH_US,
                str(Path(sys.executable).with_name("ray")),
                "start",
                "--block",
                "--disable-usage-stats",
            ),
            *(f"--address={self.provider_config['address']}", f"--node-ip-address={LOOPBACK}"),
            *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
            *(f"--num-cpus={resources['CPU']:g}", "--object-store-memory=100000000"),
            f"--labels={','.join(f'{label}={value}' for label, value in labels.items())}",
        ]
        for _ in range(count):
            with self._lock:
                name = f"machine-{len(self._started)}"
                environ = {**os.environ, **identity(name, tags[TAG_RAY_USER_NODE_TYPE])}
                with (Path(self.provider_config["folder"]) / f"{name}.log").open("wb") as log:
                    self._started[name] = subprocess.Popen(
                        command, env=environ, stdout=log, stderr=subprocess.STDOUT
                    )
                self._tags[name] = dict(tags)

    def terminate_node(self, node_id: str) -> None:
        """End one machine with SIGTERM."""
        self._tags.pop(node_id)
        self._started[node_id].terminate()
        self._started[node_id].wait(20)

    def non_terminated_nodes(self, tag_filters: Mapping[str, str]) -> list[str]:
        """The machines that exist, with the head."""
        return [
            name for name, tags in dict(self._tags).items() if tag_filters.items() <= tags.items()
        ]

    def is_running(self, node_id: str) -> bool:
        """Whether a machine exists."""
        return node_id in self._tags

    def is_terminated(self, node_id: str) -> bool:
        """Whether a machine has ended."""
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        """The autoscaler's tags of a machine."""
        return dict(self._tags[node_id])

    def set_node_tags(self, node_id: str, tags: Mapping[str, str]) -> None:
        """Add tags to a machine."""
        self._tags[node_id] |= tags

    def internal_ip(self, node_id: str) -> str:
        """The address of a machine."""
        return LOOPBACK

    external_ip = internal_ip
