"""Files: atomic writes, digests, downloads, buckets and safe paths.

May import: freezer.errors.
Read first: atomic.py.
"""

from freezer.files.atomic import (
    WAITS_S,
    copy_whole,
    link_or_copy,
    link_whole,
    make_folder,
    move,
    remove,
    replacing,
    retried,
    sync,
    write_whole,
)
from freezer.files.buckets import (
    SCHEMES,
    Bucket,
    RemoteError,
    open_bucket,
    path_in_bucket,
    remedy,
)
from freezer.files.digest import (
    CHANGED,
    CHUNK_BYTES,
    DOCUMENT_BYTES,
    artifact_errors,
    begin_of,
    check_digest,
    chunks_of,
    digest_bytes,
    digest_file,
    open_regular,
    read_document,
    verify_file,
)
from freezer.files.download import (
    fetch,
    file_name,
    http_session,
    identity,
    is_url,
)
from freezer.files.registries import (
    OCI,
    Registry,
    registry_address,
)
from freezer.files.scratch import (
    VARIABLE,
    cache_folder,
    check_file,
    check_folder,
    scratch_folder,
    scratch_place,
)

__all__ = [
    "CHANGED",
    "CHUNK_BYTES",
    "DOCUMENT_BYTES",
    "OCI",
    "SCHEMES",
    "VARIABLE",
    "WAITS_S",
    "Bucket",
    "Registry",
    "RemoteError",
    "artifact_errors",
    "begin_of",
    "cache_folder",
    "check_digest",
    "check_file",
    "check_folder",
    "chunks_of",
    "copy_whole",
    "digest_bytes",
    "digest_file",
    "fetch",
    "file_name",
    "http_session",
    "identity",
    "is_url",
    "link_or_copy",
    "link_whole",
    "make_folder",
    "move",
    "open_bucket",
    "open_regular",
    "path_in_bucket",
    "read_document",
    "registry_address",
    "remedy",
    "remove",
    "replacing",
    "retried",
    "scratch_folder",
    "scratch_place",
    "sync",
    "verify_file",
    "write_whole",
]
