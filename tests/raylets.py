"""A real Ray cluster of several raylets on this machine, for tests: started, killed and started again, each by its process id.

    with RayCluster(folder) as cluster:
        head = cluster.start(num_cpus=2, classes=["cpu-x86-64-v4"])
        node = cluster.start(num_cpus=1, classes=["cpu-x86-64-v3"])
        done = cluster.run([sys.executable, "-m", "jobs.optimize", ...])
        node.kill()                     # SIGKILL, as if the machine had died
        cluster.start(...)              # a node that joins late

Everything listens on 127.0.0.1, and ends with the process that started it, however that ends. Ray's files lie in a folder of /tmp
itself: paths of its sockets must stay below 108 characters.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
START_S = 90.0
LEFT_S = 15.0
"""How long what a worker has started may take to end after it: a keeper kills and reaps a tree of processes on a busy machine."""
LOOPBACK = "127.0.0.1"
TEMPORARY = "cp-ray-"

DIES_WITH_US = ("setpriv", "--pdeathsig", "TERM")
"""Runs a command that gets SIGTERM when its parent dies, even of `kill -9`; `ray start --block` then ends all that it started."""


def _remove_abandoned() -> None:
    """Remove what tests that were killed have left."""
    for folder in Path("/tmp").glob(f"{TEMPORARY}*-*"):
        pid = folder.name.removeprefix(TEMPORARY).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def environment(home: Path) -> dict[str, str]:
    """A home of its own: a local Ray writes a token into it."""
    return {
        **os.environ,
        "HOME": str(home),
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",
        "RAY_num_workers_soft_limit": "8",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }


def living_of(home: Path) -> dict[int, str]:
    """Commands, by process id, of what lives with this home: a child has that of its worker, whoever adopts it."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(home):
                found[process.pid] = " ".join(process.cmdline())
    return found


@dataclass
class Raylet:
    """A node of a cluster: `ray start --block`, and the processes that it started."""

    process: subprocess.Popen[bytes]
    log: Path
    is_head: bool

    def processes(self, name: str | None = None) -> list[psutil.Process]:
        """What lives of it, or those of a name: `raylet`, `gcs_server`."""
        try:
            own = psutil.Process(self.process.pid)
            found = [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        return [process for process in found if name is None or process.name() == name]

    def resting(self) -> list[psutil.Process]:
        """What lives of it while it works on no item: Ray's processes, its workers with them, and what is warm beside those.

        A keeper, and all below it, have left the session.
        """
        found = []
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(process.pid) == self.process.pid:
                    found.append(process)
        return found

    def kill(self) -> None:
        """End all of it with SIGKILL, as if the machine had died."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # the raylet, which comes first, may have ended it
                process.kill()
        self.process.wait(30)

    def freeze(self) -> None:
        """Stop all of it, as if the machine hung; `thaw` lets it go on."""
        for process in reversed(self.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw(self) -> None:
        """Let it go on."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # the raylet, which comes first, may have ended it
                process.resume()

    def stop(self) -> None:
        """End it in order, as `ray stop` does, and Ray's own with SIGKILL; an item that it works on must go by itself."""
        left = self.resting()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class Network:
    """A network namespace with one cable to this machine, for a raylet that can be cut off.

    Args:
        name: of the namespace; at most 11 characters.
        subnet: the third number of its addresses.
    """

    def __init__(self, name: str, subnet: int) -> None:
        self.name, self.here, self.there = name, f"10.77.{subnet}.1", f"10.77.{subnet}.2"

    def __enter__(self) -> Network:
        cable = ("type", "veth", "peer", "name", f"{self.name}-n")
        self._ip("netns", "add", self.name)
        self._ip("link", "add", f"{self.name}-h", *cable)
        self._ip("link", "set", f"{self.name}-n", "netns", self.name)
        self._ip("addr", "add", f"{self.here}/30", "dev", f"{self.name}-h")
        self._ip("link", "set", f"{self.name}-h", "up")
        for words in (("addr", "add", f"{self.there}/30", "dev", f"{self.name}-n"), ("link", "set", f"{self.name}-n", "up")):
            self._ip("-n", self.name, *words)
        self._ip("-n", self.name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        self._ip("netns", "del", self.name)

    def cut(self) -> None:
        """Pull the cable."""
        self._ip("link", "set", f"{self.name}-h", "down")

    def heal(self) -> None:
        """Plug it in again."""
        self._ip("link", "set", f"{self.name}-h", "up")

    @staticmethod
    def allowed() -> bool:
        """Whether this process may make one."""
        done = subprocess.run(["unshare", "--net", "ip", "link", "show"], capture_output=True, check=False)
        return os.geteuid() == 0 and done.returncode == 0

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)


class RayCluster:
    """A cluster; the first raylet that is started is its head.

    Args:
        folder: home, logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.ip = LOOPBACK
        self.raylets: list[Raylet] = []
        _remove_abandoned()
        self._temporary = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{os.getpid()}-", dir="/tmp"))

    def __enter__(self) -> RayCluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        left = self.end()
        assert left == [] or kind is not None, left

    def end(self, within_s: float = LEFT_S) -> list[str]:
        """End all raylets; what lived on nevertheless, longer than it may, and was killed."""
        for raylet in reversed(self.raylets):
            raylet.stop()
        self.raylets.clear()
        left = self.left(within_s)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._temporary, ignore_errors=True)
        return list(left.values())

    def left(self, within_s: float = LEFT_S) -> dict[int, str]:
        """What lives and should not once no driver runs: items, and what has outlived its worker or raylet.

        Args:
            within_s: how long it may take to go.

        Returns:
            Commands by process id.
        """
        deadline = time.monotonic() + within_s
        while left := self._left_now():
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        return left

    def _left_now(self) -> dict[int, str]:
        living = living_of(self.folder)
        resting = {process.pid for raylet in self.raylets for process in raylet.resting()}
        return {pid: command for pid, command in living.items() if pid not in resting}

    @property
    def address(self) -> str:
        """As `--address` takes it."""
        return f"{self.ip}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Of processes that join the cluster."""
        return environment(self.folder)

    def start(
        self,
        *,
        num_cpus: int,
        classes: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        before: Sequence[str] = (),
        head: bool | None = None,
        network: Network | None = None,
    ) -> Raylet:
        """Start a raylet, and wait until it runs.

        Args:
            num_cpus: that it offers.
            classes: that it is labelled with.
            environ: variables besides.
            options: of `ray start` besides.
            before: a command that runs it: `unshare ...`, `ip netns exec ...`.
            head: whether it is the head; the first is.
            network: that it lives in; the head must be on `Network.here` then (`ip`).
        """
        head = not self.raylets if head is None else head
        log = self.folder / f"raylet-{len(self.raylets)}.log"
        place = (
            ["--head", f"--port={self.port}", "--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
            if head
            else [f"--address={self.address}"]
        )
        labels = [f"--labels={','.join(f'coldpress.dev/{name}=true' for name in classes)}"] if classes else []
        ip = network.there if network else self.ip
        inside = ["ip", "netns", "exec", network.name] if network else []
        command = [
            *inside,
            *before,
            *DIES_WITH_US,
            *(str(Path(sys.executable).with_name("ray")), "start", *place, *labels, "--block", "--disable-usage-stats"),
            *(
                f"--node-ip-address={ip}",
                f"--num-cpus={num_cpus}",
                "--object-store-memory=100000000",
            ),
            *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
            *([f"--temp-dir={self._temporary}"] if head else []),
            *options,
        ]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                env={**self.environment, **(environ or {})},
                cwd=self.folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        raylet = Raylet(process, log, head)
        self.raylets.append(raylet)
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return raylet

    def popen(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a driver of the cluster; what it prints comes through its stdout."""
        return subprocess.Popen(
            [*DIES_WITH_US, *command],
            env={**self.environment, "RAY_ADDRESS": self.address, **(environ or {})},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: Sequence[str], timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a driver of the cluster to its end."""
        with self.popen(command) as process:
            try:
                output = process.communicate(timeout=timeout_s)[0]
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, output, "")
