"""The lease of a campaign. It keeps a second driver out, and stops one that has lost it.

    STORE/.coldpress/ledger/lock-<campaign>        flock: exact on one machine, and on file systems
                                                   that share locks
    STORE/.coldpress/ledger/lease-<campaign>.json  the holder, rewritten every HEARTBEAT_S; removed
                                                   when the driver ends

In a bucket the lease is an object, without a lock: it is written, and read again after SETTLE_S. By
then any other driver that saw no lease has written its own.

A lease is free if its process is seen dead (same boot, same process namespace), or if its content
has not changed for `expiry_s` of the observer's monotonic clock: clocks of two machines are never
compared. A new holder writes its own token. A driver looks for its token before each write
(`Lease.check`), so one that slept, or whose disk hung, writes nothing more.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from freezer.codec import encode, frozen, read_record
from freezer.errors import (
    InfrastructureError,
    IntegrityError,
    StoreUnreachableError,
    UsageError,
)
from freezer.files import WAITS_S, make_folder, open_regular, retried, write_whole
from freezer.store import Store, user_name
from pipeline.ledger.segments import LEDGER, failing_as
from pipeline.records import Note, iso
from pipeline.workspace import boot_id, process_namespace, process_started

POLL_S = 0.5

HEARTBEAT_S = 5.0
"""Time between two heartbeats of a driver."""

EXPIRY_S = 30.0
"""Time without a heartbeat after which another driver may take over."""

SETTLE_S = 1.0
"""Time between writing a lease in a bucket and reading it again."""

_CAMPAIGN = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._'+-]{0,99}")
"""Names of campaigns: they are part of file names and of MLflow's tags."""


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


def lease_path(campaign: str) -> str:
    """Return the path of a campaign's lease in its store."""
    return f"{LEDGER}/lease-{campaign}.json"


def read_holder(store: Store, campaign: str) -> Holder | None:
    """Return the holder of a campaign's lease, also one that has ended; None without a lease, or
    with a damaged one.

    Raises:
        StoreUnreachableError: the lease cannot be read.
    """
    path = lease_path(campaign)
    with failing_as(f"the lease of {campaign!r} in {store.uri} cannot be read"):
        try:
            content = retried(lambda: store.files.read(path))
            return read_record(Holder, content, origin=path)
        except (FileNotFoundError, IntegrityError):
            return None


def living_holder(store: Store, campaign: str, notify: Note = lambda _: None) -> Holder | None:
    """Return the holder of a campaign's lease if it lives: if its process cannot be checked, wait
    for a heartbeat.

    Args:
        store, campaign: of the lease.
        notify: takes messages about the wait.

    Raises:
        StoreUnreachableError: the lease cannot be read.
    """
    first = read_holder(store, campaign)
    if first is None or first.is_dead():
        return None
    if first.is_here():
        return first
    notify(f"watching up to {first.expiry_s:.0f} s for a heartbeat of {first.who}")
    until = time.monotonic() + first.expiry_s
    while time.monotonic() < until:
        time.sleep(min(POLL_S, first.heartbeat_s))
        now = read_holder(store, campaign)
        if now is None or now.is_dead():
            return None
        if (now.token, now.beat) != (first.token, first.beat):
            return now
    return None


class LeaseLostError(InfrastructureError):
    """Another driver has taken the campaign over; this one must write nothing more."""

    code = "CP-CAMPAIGN-RUNNING"


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


@contextmanager
def campaign_lock(store: Store, campaign: str, notify: Note = lambda _: None) -> Iterator[Lease]:
    """Hold the right to write for a campaign. One process at a time has it; it is free again when
    that process dies.

    Args:
        store: of the campaign. In a bucket, the lease is advisory.
        campaign: name.
        notify: takes messages about the wait for a driver of another machine.

    Raises:
        InfrastructureError: another process has it.
        StoreUnreachableError: the lock or the lease cannot be written.
    """
    folder = store.root / LEDGER
    with failing_as(f"the ledger {folder} cannot be opened"):
        make_folder(folder)
        lock = retried(lambda: open_regular(folder / f"lock-{campaign}", "ab"))
    with lock:
        with failing_as(f"the lease of {campaign!r} in {store.uri} cannot be written"):
            if _is_locked(lock):
                raise _running(campaign, folder, read_holder(store, campaign))
            holder = living_holder(store, campaign, notify)
            if holder is not None:
                raise _running(campaign, folder, holder)
            dead = read_holder(store, campaign)
            lease = Lease(store, campaign, after=dead.unended_since if dead else None)
            lease.write()
            if store.remote is not None:
                time.sleep(SETTLE_S)  # any other driver that saw no lease has written by now
                if not lease.is_held():
                    raise _running(campaign, folder, read_holder(store, campaign))
        with lease:
            yield lease


def _is_locked(lock: IO[bytes]) -> bool:
    """Whether another process has the lock. Without locks in the file system the lease decides."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _running(campaign: str, folder: Path, holder: Holder | None) -> InfrastructureError:
    who = f": {holder.who}" if holder else ""
    return InfrastructureError(
        f"campaign {campaign!r} is being run by another driver on {folder}{who}; wait for it, or"
        " name another with --campaign; to take over, end that process: its lease is free at once"
        f" on its machine, elsewhere after {EXPIRY_S:.0f} s",
        code="CP-CAMPAIGN-RUNNING",
    )


class Lease:
    """This process's hold on a campaign, kept alive by a thread while it is entered as a context
    manager.

    Attributes:
        after: start of the last driver if it died; of several that died in a row, the first. None
            if it ended normally.
    """

    def __init__(self, store: Store, campaign: str, *, after: float | None) -> None:
        self._store = store
        self._campaign = campaign
        self.after = after
        pid = os.getpid()
        now = time.time()
        self._holder = Holder(
            token=uuid.uuid4().hex,
            host=platform.node(),
            user=user_name(),
            pid=pid,
            boot=boot_id(),
            namespace=process_namespace(),
            pid_started=process_started(pid) or 0,
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
        with suppress(OSError, StoreUnreachableError):
            if self.is_held():
                retried(lambda: self._store.files.remove(lease_path(self._campaign)))

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
        holder = read_holder(self._store, self._campaign)
        if holder is None or holder.token != self._holder.token:
            taker = f"by {holder.who}" if holder else "and given back"
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
        path = lease_path(self._campaign)
        if self._store.remote is not None:
            self._store.remote.write(path, content)
        else:
            write_whole(self._store.root / path, content, synced=False)

    def _keep_alive(self) -> None:
        """Write heartbeats until the end, or until another driver holds the lease.

        A full disk does not stop them.
        """
        while not self._ended.wait(HEARTBEAT_S):
            with suppress(OSError, StoreUnreachableError):
                if not self.is_held():
                    return
                self._holder = replace(
                    self._holder, beat=self._holder.beat + 1, beat_time=time.time()
                )
                self.write()

    def is_held(self) -> bool:
        """Whether this process still holds the lease."""
        holder = read_holder(self._store, self._campaign)
        return holder is not None and holder.token == self._holder.token
