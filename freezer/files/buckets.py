"""Buckets named by s3:// and gs:// URIs, opened with pyarrow.fs, which is imported when a bucket is
opened.

    s3://BUCKET[/PREFIX][?region=R&endpoint_override=HOST:PORT&scheme=http&anonymous=true&tls_ca_file_path=FILE]
    gs://BUCKET[/PREFIX][?endpoint_override=HOST:PORT&scheme=http&retry_limit_seconds=S]
    gs://anonymous@BUCKET/…

The query is pyarrow's, with `anonymous` added for s3://. URIs are printed and stored, so
credentials come from the environment
only: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE and others that the
AWS SDK reads, or GOOGLE_APPLICATION_CREDENTIALS. AWS_REGION, AWS_DEFAULT_REGION,
AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL apply too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from freezer.errors import (
    MissingDependencyError,
    StoreUnreachableError,
    UsageError,
    first_line,
    install_command,
)

OPTIONS = {
    "s3": ("region", "endpoint_override", "scheme", "anonymous", "tls_ca_file_path"),
    "gs": ("endpoint_override", "scheme", "retry_limit_seconds"),
}
"""Options of the query by scheme."""

SCHEMES = tuple(OPTIONS)

_CONNECT_S, _READ_S = 5, 20
"""Timeouts of a connection, and between two pieces of an answer."""

ATTEMPTS = 4
"""Attempts at one request to S3."""

RETRY_LIMIT_S = 30
"""Longest time for retries of a request to Google."""


class RemoteError(OSError):
    """A bucket or registry failed; never raised for local files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A place in a bucket.

    Attributes:
        uri: the URI that opened it.
        filesystem: pyarrow's.
        base: BUCKET/PREFIX, its path in the filesystem.
        where: its URI without options.
    """

    uri: str
    filesystem: Any
    base: str
    where: str


def open_bucket(uri: str) -> Bucket:
    """Open the place that a URI names, without reaching it yet.

    Raises:
        UsageError: the URI names no bucket, has an unknown option, or contains credentials.
        MissingDependencyError: pyarrow is not installed.
        StoreUnreachableError: the region of the bucket cannot be determined.
    """
    parts = urlsplit(uri)
    options = _options(uri, parts)
    try:
        from pyarrow import ArrowException, fs
    except ImportError:
        raise MissingDependencyError(
            f"{uri!r}: {parts.scheme}:// needs pyarrow; {install_command('pyarrow')}"
        ) from None
    try:
        if parts.scheme == "s3":
            filesystem = _s3(fs, parts.netloc, options)
        else:
            query = urlencode({"retry_limit_seconds": RETRY_LIMIT_S, **options})
            filesystem, _ = fs.FileSystem.from_uri(parts._replace(query=query).geturl())
    except (ArrowException, ValueError) as error:
        raise UsageError(f"{uri!r}: {first_line(error)}") from error
    except OSError as error:
        raise StoreUnreachableError(
            f"{uri!r} cannot be reached: {first_line(error)}; {remedy(parts.scheme)}"
        ) from error
    base = path_in_bucket(uri)
    return Bucket(uri=uri, filesystem=filesystem, base=base, where=f"{parts.scheme}://{base}")


def path_in_bucket(uri: str) -> str:
    """BUCKET/PREFIX of a URI."""
    parts = urlsplit(uri)
    return unquote(f"{parts.netloc.removeprefix('anonymous@')}{parts.path}").strip("/")


def remedy(scheme: str) -> str:
    """Advice for a bucket that cannot be reached."""
    where = (
        "AWS_ACCESS_KEY_ID or AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL"
        if scheme == "s3"
        else "GOOGLE_APPLICATION_CREDENTIALS"
    )
    return (
        "check the network, the bucket's name, and that this process has credentials for it"
        f" ({where})"
    )


def _options(uri: str, parts: SplitResult) -> dict[str, str]:
    if not parts.hostname:
        raise UsageError(f"{uri!r} names no bucket; expected {parts.scheme}://BUCKET/PREFIX")
    if "@" in parts.netloc and not (parts.scheme == "gs" and parts.netloc.startswith("anonymous@")):
        raise UsageError(
            f"{parts.scheme}://…{parts.netloc.rpartition('@')[2]}{parts.path} contains credentials,"
            " but URIs are printed and stored; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or"
            " AWS_PROFILE"
        )
    known = OPTIONS[parts.scheme]
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(known)):
        raise UsageError(
            f"{uri!r}: unknown option {', '.join(unknown)}; expected {', '.join(known)}"
        )
    return options


def _s3(
    fs: Any,
    bucket: str,
    options: dict[str, str],
) -> Any:
    """A filesystem with bounded retries; asks AWS for the region of the bucket unless it is
    given.
    """
    environ = os.environ
    endpoint = (
        options.get("endpoint_override")
        or environ.get("AWS_ENDPOINT_URL_S3")
        or environ.get("AWS_ENDPOINT_URL")
    )
    region = options.get("region") or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    if region is None and endpoint is None:
        region = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        **{
            **options,
            "region": region,
            "endpoint_override": endpoint,
            "anonymous": options.get("anonymous", "").lower() == "true",
        },
        connect_timeout=_CONNECT_S,
        request_timeout=_READ_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        allow_delayed_open=True,  # small files take one request
    )
