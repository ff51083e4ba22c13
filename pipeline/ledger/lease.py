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

from freezer.codec import encode
from freezer.errors import InfrastructureError, StoreUnreachableError, UsageError
from freezer.files import WAITS_S, make_folder, open_regular, retried, write_whole
from freezer.store import RemoteFiles, user_name
from pipeline.ledger.lease_holder import (
    POLL_S,
    Holder,
    LeaseObject,
    lease_of,
    living_holder,
    read_holder,
)
from pipeline.records import Note
from pipeline.workspace import boot_id, process_namespace, process_started

HEARTBEAT_S = 5.0
"""Time between two heartbeats of a driver."""

EXPIRY_S = 30.0
"""Time without a heartbeat after which another driver may take over."""

SETTLE_S = 1.0
"""Time between writing a lease in a bucket and reading it again."""

_CAMPAIGN = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._'+-]{0,99}")
"""Names of campaigns: they are part of file names and of MLflow's tags."""


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
def campaign_lock(
    folder: Path,
    campaign: str,
    notify: Note = lambda _: None,
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
        lock = retried(lambda: open_regular(folder / f"lock-{campaign}", "ab"))
    except OSError as error:
        raise StoreUnreachableError(f"the ledger {folder} cannot be opened: {error}") from error
    with lock:
        try:
            if _is_locked(lock):
                raise _running(campaign, folder, read_holder(path))
            holder = living_holder(path, notify)
            if holder is not None:
                raise _running(campaign, folder, holder)
            dead = read_holder(path)
            lease = Lease(path, campaign, after=dead.unended_since if dead is not None else None)
            lease.write()
            if remote is not None:
                time.sleep(SETTLE_S)  # any other driver that saw no lease has written by now
                holder = read_holder(path)
                if holder is None or holder.token != lease.token:
                    raise _running(campaign, folder, holder)
        except OSError as error:
            message = f"the lease {path} cannot be read or written: {error}"
            raise StoreUnreachableError(message) from error
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

    def __init__(
        self,
        path: Path | LeaseObject,
        campaign: str,
        *,
        after: float | None,
    ) -> None:
        self._path = path
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
        self._thread = threading.Thread(
            target=self._keep_alive,
            name="lease",
            daemon=True,
        )

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the heartbeats, and remove the lease if this process still holds it."""
        self._ended.set()
        self._thread.join(2 * POLL_S + sum(WAITS_S))  # longer only if the disk fails
        with suppress(OSError):
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
            holder = read_holder(self._path)
        except OSError as error:
            message = f"the lease {self._path} cannot be read: {error}"
            raise StoreUnreachableError(message) from error
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
        if isinstance(self._path, LeaseObject):
            self._path.write(content)
        else:
            write_whole(self._path, content, synced=False)

    def _keep_alive(self) -> None:
        """Write heartbeats until the end, or until another driver holds the lease.

        A full disk does not stop them.
        """
        while not self._ended.wait(HEARTBEAT_S):
            with suppress(OSError):
                if not self._is_ours():
                    return
                beat = self._holder.beat + 1
                self._holder = replace(
                    self._holder,
                    beat=beat,
                    beat_time=time.time(),
                )
                self.write()

    def _is_ours(self) -> bool:
        holder = read_holder(self._path)
        return holder is not None and holder.token == self._holder.token
