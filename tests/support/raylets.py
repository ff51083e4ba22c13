"""A Ray cluster of several raylets on this machine, which tests start and kill one by one.

    with RayCluster(folder) as cluster:
        head = cluster.start(num_cpus=2, classes=["cpu-x86-64-v4"])
        node = cluster.start(num_cpus=1, classes=["cpu-x86-64-v3"])
        done = cluster.run([sys.executable, "-m", "jobs.optimize", ...])
        node.kill()                     # SIGKILL, as if the machine had died
        cluster.start(...)              # a node that joins late

Everything listens on 127.0.0.1, and ends with the process that started it. Ray's files are in a
folder of /tmp, because the paths of its sockets must stay below 108 characters."""

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
START_S = 90.0
LEFT_S = 15.0
"""How long the processes of a worker may take to end after it, on a busy machine."""

LOOPBACK = "127.0.0.1"

DIES_WITH_US = ("setpriv", "--pdeathsig", "TERM")
"""Runs a command that gets SIGTERM when its parent dies, even by SIGKILL; `ray start --block` then
ends everything it started.
"""


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.1)


def wait_for_ray(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a `ray start --block` has written that it runs."""

    def runs() -> bool:
        assert process.poll() is None, log.read_text()
        return "Ray runtime started" in log.read_text()

    wait_until(runs, str(log), START_S)


@dataclass
class Raylet:
    """A node of a cluster: `ray start --block`, and the processes that it started."""

    process: subprocess.Popen[bytes]

    def processes(self, name: str | None = None) -> list[psutil.Process]:
        """Its live processes, or those of a name: `raylet`, `gcs_server`."""
        try:
            own = psutil.Process(self.process.pid)
            found = [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        return [process for process in found if name is None or process.name() == name]

    def resting(self) -> list[psutil.Process]:
        """Its live processes that belong to no item: those of Ray, its workers, and their warm
        forkservers.

        The keeper of an item starts a session of its own.
        """
        found = []
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(process.pid) == self.process.pid:
                    found.append(process)
        return found

    def kill(self) -> None:
        """Kill all its processes, as if the machine had died."""
        _each(self.processes(), psutil.Process.kill)
        self.process.wait(30)

    def freeze(self) -> None:
        """Suspend all its processes, as if the machine hung."""
        _each(reversed(self.processes()), psutil.Process.suspend)

    def thaw(self) -> None:
        """Resume all its processes."""
        _each(self.processes(), psutil.Process.resume)

    def stop(self) -> None:
        """End it with SIGTERM, then kill what is left of Ray; a running item must end by itself."""
        left = self.resting()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        _each(left, psutil.Process.kill)


def _each(processes: Iterable[psutil.Process], do: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with contextlib.suppress(
            psutil.NoSuchProcess
        ):  # the raylet comes first, and may have ended others
            do(process)


class Network:
    """A network namespace with one cable to this machine, for a raylet that can be cut off.

    Args:
        name: of the namespace; up to 11 characters.
        subnet: the third number of its addresses.
    """

    def __init__(self, name: str, subnet: int) -> None:
        self.name, self.here, self.there = name, f"10.77.{subnet}.1", f"10.77.{subnet}.2"

    def __enter__(self) -> Network:
        here, there = f"{self.name}-h", f"{self.name}-n"
        for words in (
            f"netns add {self.name}",
            f"link add {here} type veth peer name {there}",
            f"link set {there} netns {self.name}",
            f"addr add {self.here}/30 dev {here}",
            f"link set {here} up",
            f"-n {self.name} addr add {self.there}/30 dev {there}",
            f"-n {self.name} link set {there} up",
            f"-n {self.name} link set lo up",
        ):
            self._ip(words)
        return self

    def __exit__(self, *_: object) -> None:
        self._ip(f"netns del {self.name}")

    def cut(self) -> None:
        """Pull the cable."""
        self._ip(f"link set {self.name}-h down")

    def heal(self) -> None:
        """Plug the cable in again."""
        self._ip(f"link set {self.name}-h up")

    @staticmethod
    def allowed() -> bool:
        """Whether this process may create one."""
        done = subprocess.run(
            ["unshare", "--net", "ip", "link", "show"], capture_output=True, check=False
        )
        return os.geteuid() == 0 and done.returncode == 0

    def _ip(self, words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)


class RayCluster:
    """A cluster; the first raylet to start is its head.

    Args:
        folder: the home of its processes, with their logs.
        auth_mode: RAY_AUTH_MODE of its processes; None leaves it unset, as users do.
    """

    def __init__(self, folder: Path, *, auth_mode: str | None = "disabled") -> None:
        self.folder, self._auth_mode = folder, auth_mode
        self.port = free_port()
        self.ip = LOOPBACK
        self.raylets: list[Raylet] = []
        self._temporary = Path(tempfile.mkdtemp(prefix="cp-ray-", dir="/tmp"))

    def __enter__(self) -> RayCluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        left = self.end()
        assert left == [] or kind is not None, left

    def end(self, within_s: float = LEFT_S) -> list[str]:
        """End all raylets, and kill what outlives them; return the commands of the killed
        processes.
        """
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
        """Stray processes after some time: items without a driver, and what has outlived its worker
        or raylet.

        Returns:
            Commands by process id.
        """
        deadline = time.monotonic() + within_s
        while (left := self._left_now()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _left_now(self) -> dict[int, str]:
        resting = {process.pid for raylet in self.raylets for process in raylet.resting()}
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid not in resting and process.environ().get("HOME") == str(self.folder):
                    found[process.pid] = " ".join(process.cmdline())
        return found

    @property
    def address(self) -> str:
        """The value of `--address`."""
        return f"{self.ip}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of processes that join the cluster.

        Its own home, because a local Ray writes a token into it.
        """
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")
        }
        return {
            **inherited,
            **({"RAY_AUTH_MODE": self._auth_mode} if self._auth_mode is not None else {}),
            "HOME": str(self.folder),
            "RAY_worker_niceness": "0",
            "RAY_num_workers_soft_limit": "8",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
        }

    def start(
        self,
        *,
        num_cpus: int,
        classes: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        before: Sequence[str] = (),
        network: Network | None = None,
    ) -> Raylet:
        """Start a raylet, and wait until it runs.

        Args:
            num_cpus: number of CPUs it offers.
            classes: device classes in its labels.
            environ: extra environment variables.
            options: extra options of `ray start`.
            before: a command that runs it, such as `unshare ...`.
            network: its network; the head must then use the address `Network.here` (`ip`).
        """
        log = self.folder / f"raylet-{len(self.raylets)}.log"
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            "--disable-usage-stats",
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--dashboard-agent-listen-port=0",
            "--object-store-memory=100000000",
            f"--num-cpus={num_cpus}",
            f"--node-ip-address={network.there if network else self.ip}",
        ]
        if self.raylets:
            command.append(f"--address={self.address}")
        else:
            command += ["--head", f"--port={self.port}", f"--temp-dir={self._temporary}"]
            command += [f"--ray-client-server-port={free_port()}", "--include-dashboard=false"]
        if classes:
            labels = ",".join(f"coldpress.dev/{name}=true" for name in classes)
            command.append(f"--labels={labels}")
        inside = ["ip", "netns", "exec", network.name] if network else []
        command = [*inside, *before, *DIES_WITH_US, *command, *options]
        environ = {**self.environment, **(environ or {})}
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                env=environ,
                cwd=self.folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.raylets.append(Raylet(process))
        wait_for_ray(process, log)
        return self.raylets[-1]

    def popen(
        self, command: Sequence[str], environ: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a driver of the cluster; its output is its stdout."""
        return subprocess.Popen(
            [*DIES_WITH_US, *command],
            env={**self.environment, "RAY_ADDRESS": self.address, **(environ or {})},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(
        self, command: Sequence[str], timeout_s: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a driver of the cluster to its end."""
        with self.popen(command) as process:
            try:
                output = process.communicate(timeout=timeout_s)[0]
            finally:
                process.kill()
        return subprocess.CompletedProcess(command, process.returncode, output, "")
