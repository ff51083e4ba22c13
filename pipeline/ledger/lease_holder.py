"""The holder of a lease: the driver that may write for a campaign, as other drivers see it."""

from __future__ import annotations

import json
import time
from pathlib import Path

from freezer.codec import decode, frozen
from freezer.errors import IntegrityError
from freezer.files import read_document, retried
from freezer.store import WORK, RemoteFiles
from pipeline.records import Note, iso
from pipeline.workspace import boot_id, process_namespace, process_started

POLL_S = 0.5


@frozen
class Holder:
    """The driver that holds a lease, as stored in it.

    Attributes:
        token: unique name of this holding.
        host, user, pid: for people.
        boot, namespace, pid_started: with `pid`, they identify one process. The namespace is
            included because containers have their own pids.
        started: seconds since the epoch by the holder's clock, for people.
        beat: increased by every heartbeat.
        beat_time: time of the last heartbeat by the holder's clock, for people.
        heartbeat_s, expiry_s: settings of the holder.
        after: `unended_since` of the dead driver that it took over from; None if the last driver
            ended normally. Earlier releases did not store it.
    """

    token: str
    host: str
    user: str
    pid: int
    boot: str
    namespace: str
    pid_started: int
    started: float
    beat: int
    beat_time: float
    heartbeat_s: float
    expiry_s: float
    after: float | None = None

    @property
    def unended_since(self) -> float:
        """Start of the first of the drivers that died in a row up to this one, in seconds since the
        epoch.
        """
        return self.started if self.after is None else self.after

    @property
    def who(self) -> str:
        """Description of the driver for people."""
        return f"process {self.pid} of {self.user} on {self.host} since {iso(self.started)}"

    def is_here(self) -> bool:
        """Whether the holder runs in this boot and process namespace, so that its process can be
        checked.
        """
        is_this_boot = bool(self.boot) and self.boot == boot_id()
        return is_this_boot and self.namespace == process_namespace()

    def is_dead(self) -> bool:
        """Whether the holder is known to be dead; False if it cannot be checked."""
        return self.is_here() and process_started(self.pid) != self.pid_started


class LeaseObject:
    """A lease in a bucket, with the methods of Path that leases use."""

    def __init__(self, remote: RemoteFiles, path: str) -> None:
        self._remote = remote
        self._path = path

    def __str__(self) -> str:
        return self._remote.where(self._path)

    def read_bytes(self) -> bytes:
        """Return its content, or raise FileNotFoundError."""
        return self._remote.read(self._path)

    def write(self, content: bytes) -> None:
        """Write it atomically."""
        self._remote.write(self._path, content)

    def unlink(self) -> None:
        """Remove it."""
        self._remote.remove(self._path)


def lease_path(folder: Path, campaign: str) -> Path:
    """Return the path of a campaign's lease in a ledger's folder."""
    return folder / f"lease-{campaign}.json"


def lease_of(folder: Path, campaign: str, remote: RemoteFiles | None) -> Path | LeaseObject:
    """Return the lease of a campaign in a ledger's folder, or in its bucket."""
    path = lease_path(folder, campaign)
    return path if remote is None else LeaseObject(remote, f"{WORK}/ledger/{path.name}")


def read_holder(path: Path | LeaseObject) -> Holder | None:
    """Return the holder of a lease, dead or alive; None if there is no lease, or it is damaged.

    Raises:
        OSError: the lease cannot be read.
    """
    try:
        content = retried(
            lambda: read_document(path) if isinstance(path, Path) else path.read_bytes()
        )
        return decode(Holder, json.loads(content), origin=str(path))
    except (FileNotFoundError, ValueError, IntegrityError):
        return None


def living_holder(path: Path | LeaseObject, notify: Note = lambda _: None) -> Holder | None:
    """Return the holder of a lease if it lives: if its process cannot be checked, wait for a
    heartbeat.

    Args:
        path: of the lease.
        notify: takes messages about the wait.

    Raises:
        OSError: the lease cannot be read.
    """
    first = read_holder(path)
    if first is None or first.is_dead():
        return None
    notify(f"watching up to {first.expiry_s:.0f} s for a heartbeat of {first.who}")
    until = time.monotonic() + first.expiry_s
    while time.monotonic() < until:
        time.sleep(min(POLL_S, first.heartbeat_s))
        now = read_holder(path)
        if now is None or now.is_dead():
            return None
        if (now.token, now.beat) != (first.token, first.beat):
            return now
    return None
