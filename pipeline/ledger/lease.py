"""The lease: who drives a campaign. It keeps two drivers apart, and stops one that lost it.

    STORE/.coldpress/ledger/lock-<campaign>          flock: exact on one machine, and wherever the file system shares its locks
    STORE/.coldpress/ledger/lease-<campaign>.json    who drives, written anew every HEARTBEAT_S; gone when the driver ends by itself

In a bucket the lease is an object, without a lock: written, and looked at again after SETTLE_S, by when any other that saw none has
written too.

A lease is free when its process is seen dead (same boot, same process namespace), or when its content has stayed the same for
`expiry_s` of the observer's own monotonic clock: the clocks of two machines are never compared. Whoever takes it writes a token of
its own. A driver looks for its token before each write (`Lease.check`), so one that slept, or whose disk hung, writes nothing more.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from freezer.errors import InfrastructureError, StoreUnreachableError, UsageError
from freezer.files.atomic import WAITS_S, make_folder, retried, write_whole
from freezer.store.bucket import RemoteFiles
from freezer.store.store import WORK
from pipeline.workspace.processes import boot_id, process_namespace, process_started

HEARTBEAT_S = 5.0
"""Between two heartbeats of a driver."""

EXPIRY_S = 30.0
"""Without a heartbeat, until another driver may take a lease over."""

POLL_S = 0.5

SETTLE_S = 1.0
"""Between the write of a lease in a bucket and the look whether it stayed."""

CAMPAIGN = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._'+-]{0,99}")
"""What a campaign may be called: part of file names and of MLflow's tags."""


class LeaseLostError(InfrastructureError):
    """Another driver has taken the campaign over; this one must write nothing more."""

    code = "CP-LEASE-LOST"


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A driver, as its lease tells of it.

    Attributes:
        token: of this one holding; no other has it.
        host, user, pid: for people.
        boot, namespace, pid_started: with `pid`, one process of one boot of one machine. In a container with processes of its own,
            a pid means nothing to others, so the process namespace counts too.
        started: seconds since the epoch by the holder's clock, for people.
        beat: raised by every heartbeat.
        beat_time: of the last heartbeat, by the holder's clock, for people.
        heartbeat_s, expiry_s: what the holder promises.
        after: `unended_since` of the driver that died before it, and that it took over from; None where that had ended by itself.
            Earlier releases had none.
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
        """When the first of those had started that died one after the other, this one being the last. Seconds since the epoch."""
        return self.started if self.after is None else self.after

    @property
    def who(self) -> str:
        """The driver, for people."""
        since = datetime.fromtimestamp(self.started, UTC).isoformat(sep=" ", timespec="seconds")
        return f"process {self.pid} of {self.user} on {self.host} since {since}"

    def is_here(self) -> bool:
        """Whether it can be seen from here if the holder lives: it runs in the same boot and process namespace."""
        return bool(self.boot) and (self.boot, self.namespace) == (boot_id(), process_namespace())

    def is_dead(self) -> bool:
        """Whether the holder is seen dead from here; False where that cannot be told."""
        return self.is_here() and process_started(self.pid) != self.pid_started


def check_campaign(name: str) -> None:
    """Refuse a campaign's name that cannot be part of a file's name.

    Raises:
        UsageError: it is one.
    """
    if not CAMPAIGN.fullmatch(name):
        raise UsageError(f"campaign {name!r}: expected up to 100 letters, digits, spaces or . _ - + ', a letter or digit first")


class LeaseObject:
    """A lease in a bucket: what is needed of the path of one in a folder."""

    def __init__(self, remote: RemoteFiles, path: str) -> None:
        self._remote, self._path = remote, path

    def __str__(self) -> str:
        return self._remote.where(self._path)

    def read_bytes(self) -> bytes:
        """Its content; FileNotFoundError where there is none."""
        return self._remote.read(self._path)

    def write(self, content: bytes) -> None:
        """Write it, whole or not at all."""
        self._remote.write(self._path, content)

    def unlink(self) -> None:
        """Remove it."""
        self._remote.remove(self._path)


def lease_path(folder: Path, campaign: str) -> Path:
    """Where the lease of a campaign lies in a ledger's folder."""
    return folder / f"lease-{campaign}.json"


def lease_of(folder: Path, campaign: str, remote: RemoteFiles | None) -> Path | LeaseObject:
    """The lease of a campaign: in a ledger's folder, or in the bucket that the ledger is in."""
    path = lease_path(folder, campaign)
    return path if remote is None else LeaseObject(remote, f"{WORK}/ledger/{path.name}")


def read_holder(path: Path | LeaseObject) -> Holder | None:
    """The holder that a lease names, alive or not; None where there is none, or the file is damaged.

    Raises:
        OSError: it cannot be read.
    """
    try:
        data: Mapping[str, Any] = json.loads(retried(path.read_bytes))
        return Holder(**{field.name: data[field.name] for field in fields(Holder) if field.name in data})
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def living_holder(path: Path | LeaseObject, tell: Callable[[str], None] = lambda _: None) -> Holder | None:
    """The holder of a lease if it lives: told at once where its process is seen to have died, else by watching for a heartbeat.

    Args:
        path: of the lease.
        tell: told what is waited for.

    Raises:
        OSError: the lease cannot be read.
    """
    first = read_holder(path)
    if first is None or first.is_dead():
        return None
    tell(f"watching up to {first.expiry_s:.0f} s for a heartbeat of {first.who}")
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
    folder: Path, campaign: str, tell: Callable[[str], None] = lambda _: None, *, remote: RemoteFiles | None = None
) -> Iterator[Lease]:
    """The right to write for a campaign, which one process at a time has; one that dies gives it back.

    Args:
        folder: of the ledger.
        campaign: its name.
        tell: told what is waited for, where a driver of another machine may be alive or dead.
        remote: the bucket that the ledger is in; the lease is advisory then, and `folder` this machine's.

    Raises:
        InfrastructureError: another process has it.
        StoreUnreachableError: the lock or the lease cannot be made.
    """
    path = lease_of(folder, campaign, remote)
    try:
        make_folder(folder)
        lock = retried(lambda: (folder / f"lock-{campaign}").open("a"))
    except OSError as error:
        raise StoreUnreachableError(f"the ledger {folder} cannot be opened: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _running(campaign, folder, _peek(path)) from None
        except OSError:
            pass  # a file system without locks: the lease alone keeps drivers apart
        try:
            holder = living_holder(path, tell)
            if holder is not None:
                raise _running(campaign, folder, holder)
            dead = read_holder(path)
            lease = Lease(path, campaign, after=dead.unended_since if dead is not None else None)
            lease.write()
            if remote is not None:
                time.sleep(SETTLE_S)  # any other that saw no lease has written by now
                if (holder := read_holder(path)) is None or holder.token != lease.token:
                    raise _running(campaign, folder, holder)
        except OSError as error:
            raise StoreUnreachableError(f"the lease {path} cannot be read or written: {error}") from error
        with lease:
            yield lease


def _peek(path: Path | LeaseObject) -> Holder | None:
    try:
        return read_holder(path)
    except OSError:
        return None


def _running(campaign: str, folder: Path, holder: Holder | None) -> InfrastructureError:
    who = f": {holder.who}" if holder else ""
    remedy = "wait for it, or name another with --campaign"
    if holder is not None:
        remedy += (
            f"; to take over, end that process: its lease is free at once on its machine, elsewhere after {holder.expiry_s:.0f} s"
        )
    return InfrastructureError(
        f"campaign {campaign!r} is being run by another driver on {folder}{who}; {remedy}", code="CP-CAMPAIGN-RUNNING"
    )


class Lease:
    """This process's hold on a campaign, kept alive by a thread while it is entered as a context manager.

    Attributes:
        after: when the driver before had started, which died and had not come to its end; of several that died one after the other,
            the first. None where it had ended by itself.
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
        """End the heartbeats, and give the lease back if it is still this process's."""
        self._ended.set()
        self._thread.join(2 * POLL_S + sum(WAITS_S))  # at once, unless its disk fails just now
        with contextlib.suppress(OSError):
            if self._is_ours():
                retried(self._path.unlink)

    @property
    def token(self) -> str:
        """What tells this hold from every other."""
        return self._holder.token

    def check(self) -> None:
        """Return if the lease is still this process's; to be called before anything is written for the campaign.

        Raises:
            LeaseLostError: another driver has taken over.
            StoreUnreachableError: the lease cannot be read.
        """
        try:
            found = read_holder(self._path)
        except OSError as error:
            raise StoreUnreachableError(f"the lease {self._path} cannot be read: {error}") from error
        if found is None or found.token != self._holder.token:
            taker = f"by {found.who}" if found else "and given back"
            raise LeaseLostError(
                f"the lease of campaign {self._campaign!r} was taken over {taker}: this driver slept, or lost the store, for "
                f"more than {EXPIRY_S:.0f} s; it writes nothing more, and what it had finished is kept. Leave the campaign to the "
                "other driver, or run the same command again when that has ended"
            )

    def write(self) -> None:
        """Write the lease, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        content = json.dumps(asdict(self._holder)).encode()
        if isinstance(self._path, LeaseObject):
            self._path.write(content)
        else:
            write_whole(self._path, content, synced=False)

    def _keep_alive(self) -> None:
        """Heartbeats until the end, or until the lease is another's; a disk that is full for a while stops none of them."""
        while not self._ended.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                if not self._is_ours():
                    return
                self._holder = replace(self._holder, beat=self._holder.beat + 1, beat_time=time.time())
                self.write()

    def _is_ours(self) -> bool:
        found = read_holder(self._path)
        return found is not None and found.token == self._holder.token


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as containers have
        return str(os.getuid())
