"""Buckets named by s3:// and gs:// URIs, opened with pyarrow.fs, which is imported when a bucket is opened.

    s3://BUCKET[/PREFIX][?region=R&endpoint_override=HOST:PORT&scheme=http&anonymous=true&tls_ca_file_path=FILE]
    gs://BUCKET[/PREFIX][?endpoint_override=HOST:PORT&scheme=http&retry_limit_seconds=S]       gs://anonymous@BUCKET/…

The query is pyarrow's, with `anonymous` added for s3://. URIs are printed and stored, so credentials come from the environment
only: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE and others that the AWS SDK reads, or
GOOGLE_APPLICATION_CREDENTIALS. AWS_REGION, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL apply too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from freezer.errors import MissingDependencyError, StoreUnreachableError, UsageError, first_line

SCHEMES = ("s3", "gs")

CONNECT_S, READ_S = 5, 20
"""Timeouts of a connection, and between two pieces of an answer."""

ATTEMPTS = 4
"""Attempts at one request to S3."""

RETRY_LIMIT_S = 30
"""Longest time for retries of a request to Google."""

S3_OPTIONS = ("region", "endpoint_override", "scheme", "anonymous", "tls_ca_file_path")
GS_OPTIONS = ("endpoint_override", "scheme", "retry_limit_seconds")

_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


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
        raise MissingDependencyError(f"store {uri!r}: {parts.scheme}:// needs pyarrow; pip install 'coldpress[stores]'") from None
    base = unquote(f"{parts.netloc.removeprefix('anonymous@')}{parts.path}").strip("/")
    try:
        if parts.scheme == "s3":
            filesystem = _s3(fs, parts.netloc, options)
        else:
            query = urlencode({"retry_limit_seconds": RETRY_LIMIT_S, **options})
            filesystem, _ = fs.FileSystem.from_uri(parts._replace(query=query).geturl())
    except (ArrowException, ValueError) as error:
        raise UsageError(f"store {uri!r}: {first_line(error)}") from error
    except OSError as error:
        raise StoreUnreachableError(f"store {uri!r} cannot be reached: {first_line(error)}; {remedy(parts.scheme)}") from error
    return Bucket(uri=uri, filesystem=filesystem, base=base, where=f"{parts.scheme}://{base}")


def remedy(scheme: str) -> str:
    """Advice for a bucket that cannot be reached."""
    where = "AWS_ACCESS_KEY_ID or AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL" if scheme == "s3" else "GOOGLE_APPLICATION_CREDENTIALS"
    return f"check the network, the bucket's name, and that this process has credentials for it ({where})"


def _options(uri: str, parts: SplitResult) -> dict[str, str]:
    if not parts.hostname:
        raise UsageError(f"store {uri!r} names no bucket; expected {parts.scheme}://BUCKET/PREFIX")
    if "@" in parts.netloc and not (parts.scheme == "gs" and parts.netloc.startswith("anonymous@")):
        raise UsageError(
            f"store {parts.scheme}://…{parts.netloc.rpartition('@')[2]}{parts.path} contains credentials, but URIs are "
            "printed and stored; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )
    known = S3_OPTIONS if parts.scheme == "s3" else GS_OPTIONS
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UsageError(f"store {uri!r}: unknown option {', '.join(unknown)}; expected {', '.join(known)}")
    return options


def _s3(fs: Any, bucket: str, options: dict[str, str]) -> Any:
    """A filesystem with bounded retries; asks AWS for the region of the bucket unless it is given."""
    given = {name: value for name, value in options.items() if name != "anonymous"}
    endpoint = given.get("endpoint_override") or next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), None)
    region = given.get("region") or next((os.environ[name] for name in _REGIONS if os.environ.get(name)), None)
    if region is None and endpoint is None:
        region = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        **{**given, "region": region, "endpoint_override": endpoint},
        anonymous=options.get("anonymous", "").lower() == "true",
        connect_timeout=CONNECT_S,
        request_timeout=READ_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        allow_delayed_open=True,  # small files take one request
    )
