"""Files for clusters without Kubernetes: a cluster file, systemd units, and a private authority."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml

from freezer.hardware import detect
from tests.support.commands import Done, finished
from tests.support.heads import OWN, certificates
from tests.support.manifests import FLEET, labels_of
from tests.support.raylets import (
    DIES_WITH_US,
    LOOPBACK,
    ROOT,
    Raylet,
    free_port,
    wait_for_ray,
)

FOLDER = ROOT / "infra" / "ray"


@pytest.fixture(scope="module")
def prepared() -> dict[str, Any]:
    """The cluster file with Ray's defaults, as `ray up` reads it."""
    from ray.autoscaler._private.util import prepare_config

    return prepare_config(yaml.safe_load((FOLDER / "cluster.yaml").read_text()))


def test_the_cluster_file_passes_ray_validation(prepared: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import validate_config

    validate_config(prepared)
    head_type = {**prepared["available_node_types"]["head"], "label": {}}
    with pytest.raises(Exception, match="label"):
        validate_config({**prepared, "available_node_types": {"head": head_type}})
    head, worker = prepared["head_start_ray_commands"][1], prepared["worker_start_ray_commands"][1]
    assert "RAY_enable_autoscaler_v2=1" in head
    assert "--num-cpus=0" in head
    for command in (head, worker):
        assert "RAY_AUTH_MODE=token" in command
        subprocess.run(["bash", "-n", "-c", command], check=True)
    assert not prepared["setup_commands"], "Ray's defaults install another Ray"


def test_node_types_are_the_device_classes(prepared: dict[str, Any]) -> None:
    """What the second autoscaler reads of each type: without labels and memory it starts no machine
    for a campaign.
    """
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig

    types = AutoscalingConfig(prepared, skip_content_hash=True).get_node_type_configs()
    assert types.pop(prepared["head_node_type"]).resources == {"CPU": 0}
    assert set(types) == set(FLEET)
    for name, found in types.items():
        assert found.labels == labels_of(name)
        assert {"CPU", "memory"} <= set(found.resources)


@pytest.mark.parametrize(
    ("name", "options"), [("cpu-zen4", []), ("cuda-sm90", ["--device-class=cuda-sm90"])]
)
def test_gpu_machines_get_no_labels_of_their_cpu(
    name: str, options: list[str], prepared: dict[str, Any], tmp_path: Path
) -> None:
    """Ray adds a type's labels to those of the start command, which runs here with programs that
    only note their arguments.
    """
    from ray.autoscaler._private.util import with_envs

    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for program in ("coldpress", "ray"):
        (binaries / program).write_text(
            f'#!/bin/sh\necho {program} "$@" >> {tmp_path}/log\necho --of={program}\n'
        )
        (binaries / program).chmod(0o755)
    _, start = with_envs(
        prepared["worker_start_ray_commands"], {"RAY_HEAD_IP": LOOPBACK, "RAY_NODE_TYPE_NAME": name}
    )
    start = start.replace("/opt/coldpress", str(tmp_path))
    start = start.replace("ulimit -n 65536", "true").replace("env $environment ", "")
    subprocess.run(["bash", "-c", start], check=True)
    *labels, ray = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    module = ["coldpress", "worker-labels"]
    assert labels == [[*module, *options, "--environment"], [*module, *options]]
    assert {"--of=coldpress", f"--address={LOOPBACK}:6379"} < set(ray)


def command(unit: str) -> list[str]:
    """The command of a unit, as systemd would execute it."""
    lines = (FOLDER / unit).read_text().replace("\\\n", " ").splitlines()
    (line,) = [line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")]
    return shlex.split(line.replace("$$", "$"))


@contextlib.contextmanager
def started(unit: str, environ: Mapping[str, str], log: Path) -> Iterator[None]:
    """Run a unit's command in the checkout until the block ends."""
    with (
        log.open("w") as file,
        subprocess.Popen(
            [*DIES_WITH_US, *command(unit)],
            env=environ,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            wait_for_ray(process, log)
            yield
        finally:
            Raylet(process).stop()


CONNECTS = """
import json, platform, sys
from pipeline.cluster.client import connect
with connect(sys.argv[1]) as cluster:
    [node] = cluster.nodes()
    handle = cluster.start(platform.node, name="n", class_name="portable", node=node, num_cpus=0)
    ran = isinstance(cluster.wait([handle], timeout_s=60)[0].value, str)
    print(json.dumps([node.classes, node.num_cpus, ran]))
"""


@pytest.mark.cluster
@pytest.mark.slow
def test_units_start_a_cluster_with_token_and_tls(tmp_path: Path) -> None:
    """The commands of both units with the variables of ray.env, and drivers with and without its
    credentials.
    """
    text = (FOLDER / "ray.env").read_text()
    documented = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    own = {
        "HEAD": f"{OWN}:{free_port()}",
        "RAY_AUTH_TOKEN_PATH": str(token),
        **certificates(tmp_path / "tls"),
    }
    assert set(documented) - set(own) == {"RAY_AUTH_MODE"}, (
        "ray.env sets the variables of certificates.sh, the token and the head"
    )
    # Directly in /tmp: paths of sockets are limited to 108 characters.
    temporary = tempfile.mkdtemp(prefix="cp-ray-", dir="/tmp")
    options = (
        f"--node-ip-address={OWN} --dashboard-agent-listen-port=0 --min-worker-port=0"
        " --max-worker-port=0"
    )
    on_head = (
        f"{options} --port={own['HEAD'].rpartition(':')[2]} --dashboard-host={LOOPBACK}"
        f" --dashboard-port={free_port()} --temp-dir={temporary}"
        f" --ray-client-server-port={free_port()}"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ = {
        **inherited,
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
        **documented,
        **own,
    }

    def connected(**without: str) -> Done:
        command = (sys.executable, "-W", "ignore", "-c", CONNECTS, own["HEAD"])
        return finished(*command, env=environ | without, cwd=ROOT, timeout_s=120)

    def unit(name: str, options: str) -> AbstractContextManager[None]:
        log = tmp_path / f"{name}.log"
        return started(f"coldpress-{name}.service", environ | {"RAY_START_OPTIONS": options}, log)

    try:
        with unit("head", on_head), unit("worker", options):
            done = connected()
            assert done.returncode == 0, done.stderr
            classes, num_cpus, ran = json.loads(done.stdout)
            assert set(classes) == set(detect().classes)
            assert (num_cpus >= 1, ran) == (True, True)
            assert "cannot be reached" in connected(RAY_USE_TLS="0").stderr
            assert connected(**certificates(tmp_path / "others")).returncode != 0
            assert "rejects the token" in connected(RAY_AUTH_MODE="disabled").stderr
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
