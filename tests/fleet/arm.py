"""Arm machines that qemu emulates in a root file system of their own (root-filesystem.sh)."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.commands import Done, finished
from tests.support.raylets import DIES_WITH_US, LOOPBACK, ROOT, Raylet, free_port, wait_until

HERE = Path(__file__).parent
ARM_ROOT = os.environ.get("COLDPRESS_ARM_ROOT", "")
JOIN_S = 300.0

VARIABLES = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_health_check_failure_threshold": "20",
    "PYTHONWARNINGS": "ignore",
}
"""Of all machines: Debian's Python has another patch version than this one's."""

CPUS = {
    "cpu-aarch64": "neoverse-n1",
    "cpu-neoverse-v1": "max,sve256=on,sve512=off,sve1024=off,sve2048=off",
    "cpu-neoverse-v2": "max,sve128=on,sve256=off,sve512=off,sve1024=off,sve2048=off",
}
"""QEMU_CPU for the best class of each machine."""

PORTS = (
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
"""Options of `ray start`: a raylet waits 15 s for each port that is not given, then ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmMachine:
    """An emulated machine.

    Attributes:
        device_class: its best class.
        folder: what it shares with this machine, at the same path.
    """

    device_class: str
    folder: Path

    def command(self, *words: object) -> list[str]:
        """The command that runs a command there."""
        inside = [*DIES_WITH_US, str(HERE / "inside.sh"), ARM_ROOT, str(self.folder)]
        return [*inside, *map(str, words)]

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of its processes besides those of inside.sh; none is this machine's."""
        return {**VARIABLES, "QEMU_CPU": CPUS[self.device_class]}

    def run(self, *words: object) -> Done:
        """Run a command there to its end."""
        return finished(*self.command(*words), env=self.environment, timeout_s=900)

    def popen(self, *words: object, log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command there whose output goes to a file."""
        with log.open("wb") as file:
            return subprocess.Popen(
                self.command(*words),
                env={**self.environment, **variables},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_worker(self, head: str) -> Raylet:
        """Start the worker of infra's image as a node with one core, and wait until it joined."""
        log, temporary = self.folder / f"{self.device_class}.log", f"/tmp/ray-{self.device_class}"
        shutil.rmtree(f"{ARM_ROOT}{temporary}", ignore_errors=True)
        options = [f"--node-ip-address={LOOPBACK}", f"--temp-dir={temporary}"]
        options += ["--num-cpus=1", "--min-worker-port=0", "--max-worker-port=0"]
        ports = {name: free_port() for name in PORTS}
        options += [f"--{name}={port}" for name, port in ports.items()]
        found = Raylet(self.popen(ROOT / "infra/images/worker.sh", *options, log=log, HEAD=head))

        def joined() -> bool:
            assert found.process.poll() is None, log.read_text()
            for process in found.processes():
                with contextlib.suppress(psutil.Error):
                    announce(process.cmdline(), ports[PORTS[0]])
            return "Ray runtime started" in log.read_text()

        wait_until(joined, str(log), JOIN_S)
        return found


def announce(command: Sequence[str], port: int) -> None:
    """Write the port of a node's dashboard agent where the raylet looks for it: emulated, the agent
    takes longer than 15 s to do so, even if `ray start` names the port.
    """
    arguments = dict(argument.split("=", 1) for argument in command if "=" in argument)
    session, node = arguments.get("--session-dir"), arguments.get("--node-id")
    if session and node:
        file = Path(f"{ARM_ROOT}{session}") / f"dashboard_agent_listen_port_{node}"
        file.write_text(str(port))
