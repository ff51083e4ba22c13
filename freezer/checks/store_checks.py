"""Check of a store: whether it can be read and written."""

from __future__ import annotations

import errno
import shlex
import uuid
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import parse_qsl, urlparse

from freezer.checks.findings import CheckRequest, Finding
from freezer.errors import ColdpressError, MissingDependencyError, UsageError
from freezer.store import WORK, LocalFiles, Store

PROBE_BYTES = 4096

FULL = (errno.ENOSPC, errno.EDQUOT)


def check_store(request: CheckRequest) -> Iterator[Finding]:
    """Whether the requested store can be read and written."""
    uri = request.store
    if uri is None:
        return
    try:
        store = Store.open(uri)
        if store.remote is None:
            next(store.root.iterdir(), None)  # `models` finds none in a forbidden folder
        models = store.models()
    except ColdpressError as error:
        yield Finding("store", error.coded, "error", _remedy(uri, error))
        return
    except OSError as error:
        yield Finding("store", f"{uri} cannot be read: {error}", "error", _remedy(uri, error))
        return
    text = f"{store.uri}: {len(models)} model{'' if len(models) == 1 else 's'}"
    try:
        _probe(store)
    except OSError as error:
        yield _not_written(store, text, error)
    else:
        yield Finding("store", f"{text}, can be read and written")


def _probe(store: Store) -> None:
    """Write, read and remove a file."""
    files = store.remote or LocalFiles(store.root, work=WORK)
    name, data = f".doctor-{uuid.uuid4().hex}", b"coldpress doctor".ljust(PROBE_BYTES)
    try:
        files.write(name, data)
        if files.read(name) != data:
            raise OSError(errno.EIO, "a file that was just written reads differently")
    finally:
        with suppress(OSError):
            if store.remote is not None:
                store.remote.remove(name)
            else:
                (store.root / name).unlink(missing_ok=True)


def _not_written(
    store: Store,
    text: str,
    error: OSError,
) -> Finding:
    """Report a store that cannot be written: an error if its disk is full, or else a warning."""
    folder = shlex.quote(store.uri)
    if error.errno in FULL:
        remedy = f"df -h {folder}   # free space, or enlarge the disk"
        return Finding("store", f"{text}, but its disk is full: {error}", "error", remedy)
    text += (
        f", but it cannot be written: {error}; deployments only read, campaigns and `coldpress"
        " sign` write"
    )
    command = f"findmnt -T {folder}" if store.remote is None else _listing(store.uri)
    return Finding("store", text, "warning", f"{command}   # grant write access")


def _remedy(uri: str, error: Exception) -> str:
    """A command for a store that cannot be opened or read."""
    if isinstance(error, MissingDependencyError):
        return "python -m pip install 'coldpress[stores]'"
    if isinstance(error, UsageError):
        return "coldpress doctor --store ./store   # or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX"
    if urlparse(uri).scheme in ("s3", "gs"):
        return f"{_listing(uri)}   # checks network and credentials without Coldpress"
    return f"ls -ld {shlex.quote(uri)}   # mount it, or let the first campaign make it"


def _listing(uri: str) -> str:
    """A command that lists a bucket without Coldpress."""
    bucket, _, query = uri.partition("?")
    if not bucket.startswith("s3:"):
        return f"gcloud storage ls {bucket}"
    options = dict(parse_qsl(query))
    command = f"aws s3 ls {bucket}/"
    if "endpoint_override" in options:
        endpoint = options["endpoint_override"]
        command += f" --endpoint-url {options.get('scheme', 'https')}://{endpoint}"
    return command
