"""Where a store is: URIs of folders and buckets, read without opening the store."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlparse

from freezer.errors import UsageError
from freezer.files import SCHEMES, path_in_bucket


def one_spelling(uri: str) -> str:
    """Normalize a store's URI without opening it: `/s`, `/s/` and `file:///s` are one store, and so
    are `s3://b/p` and `s3://b/p/`.

    Of a bucket's options only the endpoint identifies the store.

    Raises:
        UsageError: the scheme is not supported.
    """
    parts = urlparse(uri)
    if parts.scheme not in SCHEMES:
        return str(local_folder(uri))
    endpoint = dict(parse_qsl(parts.query)).get("endpoint_override")
    return f"{parts.scheme}://{path_in_bucket(uri)}" + (
        f"?endpoint_override={endpoint}" if endpoint else ""
    )


def local_folder(uri: str) -> Path:
    """The folder of a URI outside buckets.

    Raises:
        UsageError: the scheme is not supported, or the URI names another host.
    """
    parts = urlparse(uri)
    if parts.scheme not in ("", "file"):
        hint = "; copy it to a registry with skopeo or oras" if parts.scheme == "oci" else ""
        raise UsageError(
            f"store {uri!r}: unknown scheme {parts.scheme!r}; name a local folder, s3:// or gs://{hint}"
        )
    if parts.scheme and parts.netloc not in ("", "localhost"):
        raise UsageError(
            f"store {uri!r} names the host {parts.netloc!r}; a local folder is file:PATH or file:///PATH"
        )
    return Path(unquote(parts.path) if parts.scheme else uri).absolute()
