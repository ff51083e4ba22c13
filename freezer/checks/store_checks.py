"""Checks of a store: whether it can be read and written, its free space, and its clock."""

from __future__ import annotations

import errno
import shlex
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qsl, urlparse

from freezer.checks.findings import CheckRequest, Finding, Level
from freezer.checks.limit_checks import space_finding
from freezer.errors import ColdpressError, MissingDependencyError, UsageError
from freezer.store import INDEX, WORK, LocalFiles, Store

MAX_SKEW_S = 5.0
"""Difference of two clocks that has no effect: buckets give whole seconds."""

PROBE_BYTES = 4096

FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)

SET_CLOCK = "timedatectl status   # set up NTP on the machine whose clock is wrong"


def check_store(request: CheckRequest) -> Iterator[Finding]:
    """Whether the requested store is reachable and writable, with space and the same clock."""
    if request.store is None:
        return
    try:
        store = Store.open(request.store)
        num_models = len(_readable(store).models())
    except (ColdpressError, OSError) as error:
        text = (
            error.coded
            if isinstance(error, ColdpressError)
            else f"{request.store} cannot be read: {error}"
        )
        yield Finding(check="store", level="error", text=text, remedy=_remedy(request.store, error))
        return
    what = f"{store.uri}: {num_models} model{'' if num_models == 1 else 's'}"
    try:
        skew_s = _probe(store)
    except OSError as error:
        yield _not_written(store, what, error)
        skew_s = 0.0
    else:
        yield Finding(check="store", text=f"{what}, can be read and written")
    if store.remote is None:
        yield space_finding("store space", store.root)
    yield skew_finding(skew_s, _ahead(store))


def _readable(store: Store) -> Store:
    """The store, if its folder may be listed: looking for models in a forbidden one finds none."""
    if store.remote is None:
        next(store.root.iterdir(), None)
    return store


def _probe(store: Store) -> float:
    """Write, read and remove a file; return by how many seconds the store's clock is ahead of this
    machine's.
    """
    files = store.remote or LocalFiles(store.root, work=WORK)
    name, data = f".doctor-{uuid.uuid4().hex}", b"coldpress doctor".ljust(PROBE_BYTES)
    started = time.time()
    try:
        files.write(name, data)
        written, ended = files.modified(name), time.time()
        if files.read(name) != data:
            raise OSError(errno.EIO, "a file that was just written reads differently")
    finally:
        with suppress(OSError):
            if store.remote is not None:
                store.remote.remove(name)
            else:
                (store.root / name).unlink(missing_ok=True)
    return max(0.0, written - ended) or min(0.0, written - started)


def _not_written(store: Store, what: str, error: OSError) -> Finding:
    where = shlex.quote(store.uri)
    if error.errno in FULL:
        remedy = f"df -h {where}   # free space, or enlarge the disk"
        return Finding(
            check="store",
            level="error",
            text=f"{what}, but its disk is full: {error}",
            remedy=remedy,
        )
    forbidden = store.remote is not None or error.errno in FORBIDDEN
    level: Level = "warning" if forbidden else "error"
    text = f"{what}, but it cannot be written: {error}"
    only = "; deployments only read, campaigns and `coldpress sign` write" if forbidden else ""
    remedy = (
        f"touch {where}/.coldpress-test; ls -ld {where}; findmnt -T {where}   # grant write access,"
        " or mount it read-write"
    )
    if store.remote is not None:
        remedy = (
            f"{_listing(store.uri)}   # grant the credentials the rights to put and delete objects"
        )
    return Finding(check="store", level=level, text=f"{text}{only}", remedy=remedy)


def _ahead(store: Store) -> tuple[str, float] | None:
    """The path and lead of the newest index.json in a folder, if it is from the future."""
    if store.remote is not None:
        return None
    times = {path: path.stat().st_mtime - time.time() for path in store.root.glob(f"*/{INDEX}")}
    path = max(times, key=lambda path: times[path], default=Path())
    return (str(path), times[path]) if times.get(path, 0.0) > MAX_SKEW_S else None


def skew_finding(skew_s: float, ahead: tuple[str, float] | None = None) -> Finding:
    """Compare clocks.

    Args:
        skew_s: how far the store's clock is ahead of this machine's.
        ahead: path of a file from the future, and by how many seconds.
    """
    if abs(skew_s) > MAX_SKEW_S:
        text = (
            f"the store's clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'}"
            " this machine's"
        )
    elif ahead is not None:
        path, lead_s = ahead
        text = (
            f"{path} was written {lead_s:.0f} s in the future: this machine's clock is behind, or"
            " that of its writer is ahead"
        )
    else:
        return Finding(check="store clock", text="agrees with this machine's")
    effect = (
        "dates are wrong, remains of killed workers are kept or removed too early, and S3 refuses"
        " requests at 15 minutes"
    )
    return Finding(check="store clock", level="warning", text=f"{text}; {effect}", remedy=SET_CLOCK)


def _remedy(uri: str, error: Exception) -> str:
    """A command for a store that cannot be opened or read."""
    if isinstance(error, MissingDependencyError):
        return "python -m pip install 'coldpress[stores]'"
    if isinstance(error, UsageError):
        return "coldpress doctor --store ./store   # or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX"
    if urlparse(uri).scheme in ("s3", "gs"):
        return f"{_listing(uri)}   # checks network and credentials without Coldpress"
    return (
        f"ls -ld {shlex.quote(uri)}   # mount it, correct --store, or let the first campaign"
        " make it"
    )


def _listing(uri: str) -> str:
    """A command that lists a bucket without Coldpress."""
    place, _, query = uri.partition("?")
    options = dict(parse_qsl(query))
    if not place.startswith("s3:"):
        return f"gcloud storage ls {place}"
    endpoint = options.get("endpoint_override")
    return f"aws s3 ls {place}/" + (
        f" --endpoint-url {options.get('scheme', 'https')}://{endpoint}" if endpoint else ""
    )
