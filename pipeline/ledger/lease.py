"""The lease of a campaign. It keeps a second driver out, and stops one that has lost it.

    STORE/.coldpress/ledger/lock-<campaign>  flock: exact on one machine, and on file systems that share locks
    STORE/.coldpress/ledger/lease-<campaign>.json  the holder, rewritten every HEARTBEAT_S; removed when the driver ends

In a bucket the lease is an object, without a lock: it is written, and read again after SETTLE_S. By
then any other driver that saw no lease has written its own.

A lease is free if its process is seen dead (same boot, same process namespace), or if its content
has not changed for `expiry_s` of the observer's monotonic clock: clocks of two machines are never
compared. A new holder writes its own token. A driver looks for its token before each write
(`Lease.check`), so one that slept, or whose disk hung, writes nothing more.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import platform
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from freezer.codec import decode, encode
from freezer.errors import InfrastructureError, IntegrityError, StoreUnreachableError, UsageError
from freezer.files import WAITS_S, make_folder, retried, write_whole
from freezer.store import WORK, RemoteFiles
from pipeline.workspace import boot_id, process_namespace, process_started

HEARTBEAT_S = 5.0
"""Time between two heartbeats of a driver."""

EXPIRY_S = 30.0
"""Time without a heartbeat after which another driver may take over."""

POLL_S = 0.5

SETTLE_S = 1.0
"""Time between writing a lease in a bucket and reading it again."""

_CAMPAIGN = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._'+-]{0,99}")
"""Names of campaigns: they are part of file names and of MLflow's tags."""


class LeaseLostError(InfrastructureError):
    """Another driver has taken the campaign over; this one must write nothing more."""

    code = "CP-LEASE-LOST"


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The driver that holds a lease, as stored in it.

    Attributes:
        token: unique to this holding.
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
        since = datetime.fromtimestamp(self.started, UTC).isoformat(sep=" ", timespec="seconds")
        return f"process {self.pid} of {self.user} on {self.host} since {since}"

    def is_here(self) -> bool:
        """Whether the holder runs in this boot and process namespace, so that its process can be
        checked.
        """
        return bool(self.boot) and (self.boot, self.namespace) == (boot_id(), process_namespace())

    def is_dead(self) -> bool:
        """Whether the holder is known to be dead; False if it cannot be checked."""
        return self.is_here() and process_started(self.pid) != self.pid_started


def check_campaign(name: str) -> None:
    """Check a campaign's name.

    Raises:
        UsageError: it cannot be part of a file name.
    """
    if not _CAMPAIGN.fullmatch(name):
        raise UsageError(
            f"campaign {name!r}: expected up to 100 letters, digits, spaces or . _ - + ', a letter"
            " or digit first"
        )


class LeaseObject:
    """A lease in a bucket, with the methods of Path that leases use."""

    def __init__(self, remote: RemoteFiles, path: str) -> None:
        self._remote, self._path = remote, path

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
        return decode(Holder, json.loads(retried(path.read_bytes)), origin=str(path))
    except (FileNotFoundError, ValueError, IntegrityError):
        return None


def living_holder(
    path: Path | LeaseObject, notify: Callable[[str], None] = lambda _: None
) -> Holder | None:
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


@contextlib.contextmanager
def campaign_lock(
    folder: Path,
    campaign: str,
    notify: Callable[[str], None] = lambda _: None,
    *,
    remote: RemoteFiles | None = None,
) -> Iterator[Lease]:
    """Hold the right to write for a campaign. One process at a time has it; it is free again when
    that process dies.

    Args:
        folder: of the ledger.
        campaign: name.
        notify: takes messages about the wait for a driver of another machine.
        remote: the bucket that contains the ledger. The lease is then advisory, and `folder` is
            this machine's.

    Raises:
        InfrastructureError: another process has it.
        StoreUnreachableError: the lock or the lease cannot be written.
    """
    path = lease_of(folder, campaign, remote)
    try:
        make_folder(folder)
        lock = retried(lambda: (folder / f"lock-{campaign}").open("a"))
    except OSError as error:
        raise StoreUnreachableError(f"the ledger {folder} cannot be opened: {error}") from error
    with lock:
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _running(campaign, folder, read_holder(path)) from None
            except OSError:
                pass  # a file system without locks: only the lease counts
            holder = living_holder(path, notify)
            if holder is not None:
                raise _running(campaign, folder, holder)
            dead = read_holder(path)
            lease = Lease(path, campaign, after=dead.unended_since if dead is not None else None)
            lease.write()
            if remote is not None:
                time.sleep(SETTLE_S)  # any other driver that saw no lease has written by now
                if (holder := read_holder(path)) is None or holder.token != lease.token:
                    raise _running(campaign, folder, holder)
        except OSError as error:
            raise StoreUnreachableError(
                f"the lease {path} cannot be read or written: {error}"
            ) from error
        with lease:
            yield lease


def _running(campaign: str, folder: Path, holder: Holder | None) -> InfrastructureError:
    who = f": {holder.who}" if holder else ""
    remedy = "wait for it, or name another with --campaign"
    if holder is not None:
        remedy += (
            "; to take over, end that process: its lease is free at once on its machine, elsewhere"
            f" after {holder.expiry_s:.0f} s"
        )
    return InfrastructureError(
        f"campaign {campaign!r} is being run by another driver on {folder}{who}; {remedy}",
        code="CP-CAMPAIGN-RUNNING",
    )


class Lease:
    """This process's hold on a campaign, kept alive by a thread while it is entered as a context
    manager.

    Attributes:
        after: start of the last driver if it died; of several that died in a row, the first. None
            if it ended normally.
    """

    def __init__(self, path: Path | LeaseObject, campaign: str, *, after: float | None) -> None:
        self._path, self._campaign, self.after = path, campaign, after
        now = time.time()
        self._holder = Holder(
            token=uuid.uuid4().hex,
            host=platform.node(),
            user=_user(),
            pid=os.getpid(),
            boot=boot_id(),
            namespace=process_namespace(),
            pid_started=process_started(os.getpid()) or 0,
            started=now,
            beat=0,
            beat_time=now,
            heartbeat_s=HEARTBEAT_S,
            expiry_s=EXPIRY_S,
            after=after,
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the heartbeats, and remove the lease if this process still holds it."""
        self._ended.set()
        self._thread.join(2 * POLL_S + sum(WAITS_S))  # longer only if the disk fails
        with contextlib.suppress(OSError):
            if self._is_ours():
                retried(self._path.unlink)

    @property
    def token(self) -> str:
        """Unique id of this holding."""
        return self._holder.token

    def check(self) -> None:
        """Check that this process still holds the lease. Call it before each write for the
        campaign.

        Raises:
            LeaseLostError: another driver has taken over.
            StoreUnreachableError: the lease cannot be read.
        """
        try:
            found = read_holder(self._path)
        except OSError as error:
            raise StoreUnreachableError(
                f"the lease {self._path} cannot be read: {error}"
            ) from error
        if found is None or found.token != self._holder.token:
            taker = f"by {found.who}" if found else "and given back"
            raise LeaseLostError(
                f"the lease of campaign {self._campaign!r} was taken over {taker}: this driver"
                f" slept, or lost the store, for more than {EXPIRY_S:.0f} s; it writes nothing"
                " more, and what it had finished is kept. Leave the campaign to the other driver,"
                " or run the same command again when that has ended"
            )

    def write(self) -> None:
        """Write the lease atomically.

        Raises:
            OSError: it cannot be written.
        """
        content = json.dumps(encode(self._holder)).encode()
        if isinstance(self._path, LeaseObject):
            self._path.write(content)
        else:
            write_whole(self._path, content, synced=False)

    def _keep_alive(self) -> None:
        """Write heartbeats until the end, or until another driver holds the lease.

        A full disk does not stop them.
        """
        while not self._ended.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                if not self._is_ours():
                    return
                self._holder = replace(
                    self._holder, beat=self._holder.beat + 1, beat_time=time.time()
                )
                self.write()

    def _is_ours(self) -> bool:
        found = read_holder(self._path)
        return found is not None and found.token == self._holder.token


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as containers have
        return str(os.getuid())
