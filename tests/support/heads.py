"""A real head with its dashboard, a terminal, and a connection that can be cut."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.commands import Done, finished
from tests.support.raylets import LOOPBACK, ROOT, Raylet, free_port, wait_for_ray

AT_ITS_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1],"
    " sys.argv[1:])"
)
"""Program that makes its standard input the controlling terminal, and executes another."""


class Head:
    """Address of a head's dashboard, of the head, and the environment of a client."""

    def __init__(self, address: str, gcs_address: str, environ: dict[str, str]) -> None:
        self.address, self.gcs_address, self.environ = address, gcs_address, environ

    def command(
        self, folder: Path, *arguments: str, address: str | None = None, store: str | None = None
    ) -> list[str]:
        """Return the command of a submission, with database and store in `folder`."""
        places = ["--store", store or str(folder / "store"), "--python", sys.executable]
        places += ["--tracking-uri", f"sqlite:///{folder}/mlflow.db"]
        places += ["--address", address or self.address]
        return [sys.executable, "-W", "ignore", "-m", "jobs.submit", *arguments, *places]

    def submit(
        self, folder: Path, *arguments: str, store: str | None = None, **environ: str
    ) -> Done:
        command = self.command(folder, *arguments, store=store)
        return finished(*command, cwd=folder, env={**self.environ, **environ}, timeout_s=300)


@contextlib.contextmanager
def started_head(
    home: Path, variables: Mapping[str, str], ip: str = LOOPBACK, options: Sequence[str] = ()
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
        f"--node-ip-address={ip}",
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
            yield Head(f"http://{LOOPBACK}:{port}", f"{ip}:{gcs_port}", environ)
        finally:
            Raylet(process).stop()  # including hanging jobs
            shutil.rmtree(temporary, ignore_errors=True)


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, command: list[str], *, cwd: Path, environ: Mapping[str, str]) -> None:
        self._screen, theirs = pty.openpty()
        self.said = ""
        self._read = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", AT_ITS_TERMINAL, *command],
            cwd=cwd,
            env=environ,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(30)
        os.close(self._screen)

    def type(self, keys: str) -> None:
        """Press keys; "\\x03" is Ctrl-C, "\\x04" the end of input."""
        os.write(self._screen, keys.encode())

    def until(self, words: str, limit_s: float = 120.0) -> str:
        """Wait for these words; return the output since the last call."""
        deadline = time.monotonic() + limit_s
        while words not in self.said[self._read :]:
            assert time.monotonic() < deadline, f"{words!r} was not said:\n{self.said}"
            assert self._take(1.0), f"it ended without {words!r}:\n{self.said}"
        end = self.said.index(words, self._read) + len(words)
        found, self._read = self.said[self._read : end], end
        return found

    @property
    def running(self) -> bool:
        """Whether the program is running."""
        return self._process.poll() is None

    def ended(self, limit_s: float = 120.0) -> int:
        """Wait for the exit code."""
        deadline = time.monotonic() + limit_s
        while self._take(1.0):
            assert time.monotonic() < deadline, self.said
        return self._process.wait(30)

    def _take(self, limit_s: float) -> bool:
        """Read the screen; return whether more output may follow."""
        if not select.select([self._screen], [], [], limit_s)[0]:
            return True
        with contextlib.suppress(
            OSError
        ):  # raised by Linux when the last program at a terminal has ended
            data = os.read(self._screen, 1 << 16)
            self.said += data.decode(errors="replace").replace("\r\n", "\n")
            return bool(data)
        return False


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
