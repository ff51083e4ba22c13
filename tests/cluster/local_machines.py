"""Machines for Ray's autoscaler, as a cloud would give them: each is a raylet on this machine.

Ray loads `LocalMachines` in the process of its autoscaler, by the name that `provider.module` of the cluster's file has.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import NODE_KIND_HEAD, TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

from tests.raylets import DIES_WITH_US, LOOPBACK

HEAD = "head"
END_S = 20.0


def settings(folder: Path, address: str, types: Mapping[str, Mapping[str, Any]], *, idle_minutes: float) -> Path:
    """A file for `ray start --autoscaling-config`.

    Args:
        folder: the file is written there, and what each machine prints.
        address: of the head.
        types: of machines: `resources`, `labels` and `max_workers` of each.
        idle_minutes: after which a machine without work is given back.
    """
    path = folder / "autoscaler.json"
    head = {"resources": {}, "node_config": {}, "max_workers": 0}
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
        **{
            f"{name}_commands": []
            for name in ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
        },
        "cluster_synced_files": [],
        "head_node_type": HEAD,
        "available_node_types": {HEAD: head} | {name: {"node_config": {}, **given} for name, given in types.items()},
    }
    path.write_text(json.dumps(settings))
    return path


def named(instance: str, node_type: str) -> dict[str, str]:
    """Variables by which the autoscaler knows a raylet for the machine that it asked for."""
    return {"RAY_CLOUD_INSTANCE_ID": instance, "RAY_NODE_TYPE_NAME": node_type}


class LocalMachines(NodeProvider):  # type: ignore[misc]
    """See the module."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._lock = threading.Lock()
        self._tags: dict[str, dict[str, str]] = {HEAD: {TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_USER_NODE_TYPE: HEAD}}
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def create_node_with_resources_and_labels(
        self,
        node_config: Mapping[str, Any],
        tags: Mapping[str, str],
        count: int,
        resources: Mapping[str, float],
        labels: Mapping[str, str],
    ) -> None:
        """Start some of one type."""
        for _ in range(count):
            with self._lock:
                name = f"machine-{len(self._started)}"
                with (Path(self.provider_config["folder"]) / f"{name}.log").open("wb") as log:
                    self._started[name] = subprocess.Popen(
                        [
                            *DIES_WITH_US,
                            *(str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"),
                            *(f"--address={self.provider_config['address']}", f"--node-ip-address={LOOPBACK}"),
                            *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
                            *(f"--num-cpus={resources['CPU']:g}", "--object-store-memory=100000000"),
                            f"--labels={','.join(f'{label}={value}' for label, value in labels.items())}",
                        ],
                        env={**os.environ, **named(name, tags[TAG_RAY_USER_NODE_TYPE])},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                self._tags[name] = dict(tags)

    def terminate_node(self, node_id: str) -> None:
        """End one in order."""
        with self._lock:
            self._tags.pop(node_id)
            process = self._started[node_id]
        process.send_signal(signal.SIGTERM)
        process.wait(END_S)

    def terminate_nodes(self, node_ids: list[str]) -> None:
        """End some in order."""
        for node_id in node_ids:
            self.terminate_node(node_id)

    def non_terminated_nodes(self, tag_filters: Mapping[str, str]) -> list[str]:
        """Those that there are, the head among them."""
        with self._lock:
            return [name for name, tags in self._tags.items() if tag_filters.items() <= tags.items()]

    def is_running(self, node_id: str) -> bool:
        """Whether one has not been given back."""
        with self._lock:
            return node_id in self._tags

    def is_terminated(self, node_id: str) -> bool:
        """Whether one has been given back."""
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        """What the autoscaler has noted of one."""
        with self._lock:
            return dict(self._tags[node_id])

    def set_node_tags(self, node_id: str, tags: Mapping[str, str]) -> None:
        """Note something of one."""
        with self._lock:
            self._tags[node_id] |= tags

    def internal_ip(self, node_id: str) -> str:
        """Where one is."""
        return LOOPBACK

    def external_ip(self, node_id: str) -> str:
        """Where one is."""
        return LOOPBACK
