"""A real head with its dashboard, and certificates of loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.commands import Done, finished
from tests.support.raylets import LOOPBACK, ROOT, Raylet, free_port, wait_for_ray


class Head:
    """Address of a head's dashboard, of the head, and the environment of a client."""

    def __init__(self, address: str, gcs_address: str, environ: dict[str, str]) -> None:
        self.address, self.gcs_address, self.environ = address, gcs_address, environ

    def submit(
        self, folder: Path, *arguments: str, store: str | None = None, **environ: str
    ) -> Done:
        """Submit a campaign, with database and store in `folder`."""
        places = ["--store", store or str(folder / "store"), "--python", sys.executable]
        places += ["--tracking-uri", f"sqlite:///{folder}/mlflow.db"]
        places += ["--address", self.address]
        command = [sys.executable, "-W", "ignore", "-m", "jobs.submit", *arguments, *places]
        return finished(*command, cwd=folder, env={**self.environ, **environ}, timeout_s=300)


@contextlib.contextmanager
def started_head(
    home: Path, variables: Mapping[str, str], options: Sequence[str] = ()
) -> Iterator[Head]:
    """Run a head on loopback. Ray replaces 127.0.0.1 by the machine's own address.

    Args:
        options: further ones of `ray start`, in place of those here.
    """
    environ = {**os.environ, "HOME": str(home), "PYTHONWARNINGS": "ignore", **variables}
    environ.pop("RAY_ADDRESS", None)
    # Directly in /tmp: paths of sockets are limited to 108 characters.
    temporary = tempfile.mkdtemp(prefix="cp-ray-", dir="/tmp")
    port, gcs_port, log = free_port(), free_port(), home / "ray.log"
    command = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        "--num-cpus=2",
        "--object-store-memory=100000000",
        "--labels=coldpress.dev/portable=true",
        f"--node-ip-address={LOOPBACK}",
        f"--port={gcs_port}",
        f"--dashboard-host={LOOPBACK}",
        f"--dashboard-port={port}",
        "--dashboard-agent-listen-port=0",
        f"--ray-client-server-port={free_port()}",
        f"--temp-dir={temporary}",
        *options,
    ]
    with (
        log.open("w") as file,
        subprocess.Popen(
            command,
            env=environ,
            cwd=home,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            wait_for_ray(process, log)
            environ = {**environ, "PYTHONPATH": str(ROOT)}
            yield Head(f"http://{LOOPBACK}:{port}", f"{LOOPBACK}:{gcs_port}", environ)
        finally:
            Raylet(process).stop()  # including hanging jobs
            shutil.rmtree(temporary, ignore_errors=True)


SCRIPT = ROOT / "infra" / "ray" / "certificates.sh"


OWN = "127.0.0.2"
"""Address of the head; Ray replaces 127.0.0.1 by the machine's own address."""


def certificates(folder: Path) -> dict[str, str]:
    """Create an authority and a certificate of loopback; return Ray's variables."""
    subprocess.run([SCRIPT, str(folder), "node", "127.0.0.1", OWN], check=True, capture_output=True)
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(folder / "node" / "tls.crt"),
        "RAY_TLS_SERVER_KEY": str(folder / "node" / "tls.key"),
        "RAY_TLS_CA_CERT": str(folder / "node" / "ca.crt"),
    }
