"""Download sources and samples from https://, s3:// and gs:// URLs, atomically, and verify their
digests.

Logins to registries are read as docker and podman keep them.

Files are stored at `FOLDER/<sha256>/<name>`. A file with a pinned digest is downloaded only once.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from freezer.errors import (
    IntegrityError,
    MissingDependencyError,
    SourceError,
    UsageError,
    first_line,
    install_command,
)
from freezer.files.atomic import sync
from freezer.files.buckets import SCHEMES, RemoteError, open_bucket
from freezer.files.digest import digest_file
from freezer.files.scratch import scratch_folder

HTTP = ("https", "http")
_CHUNK_BYTES = 1 << 20
_CONNECT_S, _READ_S = 10, 60
_RETRIES = 3
PIN = "`sha256:` (with `coldpress freeze`, `--sha256`)"
"""The digest in advice, for catalogs and for the command."""
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def is_url(location: str) -> bool:
    """Whether a location is a URL that must be downloaded."""
    return urlsplit(location).scheme in (*HTTP, *SCHEMES)


def fetch(url: str, folder: Path, *, sha256: str | None = None) -> Path:
    """Download a file, and return its local path.

    Args:
        url: https://, s3:// or gs://; http:// only with a digest, as it is not authenticated.
        folder: for downloaded files; made if missing.
        sha256: expected digest, in hexadecimal.

    Raises:
        SourceError: the file does not exist, cannot be reached, or is truncated.
        IntegrityError: it has another digest.
        MissingDependencyError: the scheme needs a package that is not installed.
    """
    name = file_name(url)
    if sha256 is not None and (here := folder / sha256 / name).is_file():
        return here
    if urlsplit(url).scheme == "http" and sha256 is None:
        raise SourceError(
            f"{url}: http:// needs a digest; use https://, or add {PIN}", code="CP-FETCH"
        )
    folder.mkdir(
        parents=True,
        exist_ok=True,
    )
    with scratch_folder(place=folder) as scratch:
        unfinished = scratch / name
        with _opened(url, pinned=sha256 is not None) as source, unfinished.open("wb") as out:
            shutil.copyfileobj(source, out, _CHUNK_BYTES)
        digest = digest_file(unfinished).removeprefix("sha256:")
        if sha256 is not None and digest != sha256:
            raise IntegrityError(
                f"{url}: got sha256 {digest}, expected {sha256}; the file was changed, or the"
                f" pinned digest, {PIN}, is outdated",
                code="CP-FETCH-DIGEST",
            )
        sync(unfinished)
        done = folder / digest / name
        done.parent.mkdir(exist_ok=True)
        os.replace(unfinished, done)
        return done


def identity(url: str) -> str | None:
    """Identify the version of a file without downloading it, by ETag, size and time; None if the
    server gives none of them.

    Raises:
        SourceError: the server cannot be reached.
    """
    with _fetching(url):
        if urlsplit(url).scheme in SCHEMES:
            bucket = open_bucket(url)
            info = bucket.filesystem.get_file_info(bucket.base)
            return f"{info.size}|{info.mtime_ns}" if info.is_file else None
        with http_session() as session:
            response = session.head(
                url,
                timeout=(_CONNECT_S, _READ_S),
                allow_redirects=True,
            )
            tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
            return (
                f"{tag}|{response.headers.get('Content-Length')}" if response.ok and tag else None
            )


def file_name(url: str) -> str:
    """The last part of a URL's path."""
    return PurePosixPath(unquote(urlsplit(url).path)).name or "file"


@contextmanager
def _opened(url: str, *, pinned: bool) -> Iterator[Any]:
    with _fetching(url), ExitStack() as stack:
        if urlsplit(url).scheme in SCHEMES:
            bucket = open_bucket(url)
            yield stack.enter_context(bucket.filesystem.open_input_stream(bucket.base))
            return
        response = stack.enter_context(
            stack.enter_context(http_session()).get(
                url,
                stream=True,
                timeout=(_CONNECT_S, _READ_S),
            )
        )
        response.raise_for_status()
        if urlsplit(response.url).scheme != "https" and not pinned:
            raise SourceError(
                f"{url} redirects to {response.url}, which is not https; add {PIN}", code="CP-FETCH"
            )
        response.raw.decode_content = True
        yield response.raw


def http_session(retries: int = _RETRIES, backoff_s: float = 0.5) -> Any:
    """A session of requests that retries what servers refuse for a while, with growing waits.

    Raises:
        MissingDependencyError: requests is not installed.
    """
    try:
        import requests
        from requests.adapters import HTTPAdapter
        from urllib3.util import Retry
    except ImportError:
        raise MissingDependencyError(
            f"https:// and oci:// need requests; {install_command('requests')}"
        ) from None
    session = requests.Session()
    retry = Retry(
        total=retries,
        backoff_factor=backoff_s,
        status_forcelist=(429, 500, 502, 503, 504),
        allowed_methods=None,
        raise_on_status=False,
    )
    for scheme in HTTP:
        session.mount(f"{scheme}://", HTTPAdapter(max_retries=retry))
    return session


@contextmanager
def _fetching(url: str) -> Iterator[None]:
    """Turn errors of requests, urllib3 and pyarrow into SourceError; errors of the local
    disk pass.
    """
    try:
        yield
    except (SourceError, MissingDependencyError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK:
            raise
        raise SourceError(
            f"{url} cannot be fetched: {first_line(error)}; check that it exists and may be read",
            code="CP-FETCH",
        ) from error


TOKEN = "<token>"
"""The user of logins whose secret is a token; docker's helpers use it too."""

_HELPER_S = 30


def login_of(host: str, prefix: str = "") -> tuple[str, str] | None:
    """User and secret that docker or podman keep for a registry; None if they keep none.

    Raises:
        RemoteError: the helper that keeps them is missing or fails.
        UsageError: a file is damaged.
    """
    parts = f"{host}/{prefix}".rstrip("/").split("/")
    names = ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]
    names += [f"https://{host}{path}" for path in ("", "/v1/", "/v2/")]
    environ, home = os.environ, Path.home()
    docker = Path(environ.get("DOCKER_CONFIG") or home / ".docker", "config.json")
    podman = Path(environ.get("XDG_RUNTIME_DIR") or home / ".config", "containers/auth.json")
    given = environ.get("REGISTRY_AUTH_FILE")
    for path in [Path(given)] if given else [docker, podman]:
        if not path.is_file():
            continue
        try:
            config = json.loads(path.read_text())
            helper = config.get("credHelpers", {}).get(host) or config.get("credsStore")
            entries = config.get("auths", {})
            entry: dict[str, str] = next((entries[name] for name in names if entries.get(name)), {})
            if "identitytoken" in entry:
                return TOKEN, entry["identitytoken"]
            if "auth" in entry:
                user, _, secret = base64.b64decode(entry["auth"]).decode().partition(":")
                return user, secret
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}: {first_line(error)}; write it by `docker login`") from None
        login = _from_helper(f"docker-credential-{helper}", host) if helper else None
        if login:
            return login
    return None


def _from_helper(command: str, host: str) -> tuple[str, str] | None:
    """What a credential helper of docker keeps for a registry."""
    try:
        done = subprocess.run(
            [command, "get"],
            input=host,
            capture_output=True,
            text=True,
            timeout=_HELPER_S,
            check=False,
        )
        if done.returncode != 0 and "not found" in done.stdout:
            return None
        found = json.loads(done.stdout)
        return found["Username"], found["Secret"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise RemoteError(
            f"{command} gives no login for {host}: {first_line(error)}; install it, or remove it"
            " from docker's config.json"
        ) from None
