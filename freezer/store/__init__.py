"""Stores: versions, the OCI layout, folders, buckets and registries, and the cache of blobs.

May import: freezer.artifact and below. Imports no torch.
Read first: artifact_store.py.
"""

from freezer.store.artifact_store import (
    Store,
)
from freezer.store.bucket import (
    RemoteFiles,
)
from freezer.store.copying import (
    Form,
    copy_version,
    references,
)
from freezer.store.garbage import (
    MARKS,
    Cleaning,
    Garbage,
    collect,
    marks_in,
    write_marks,
)
from freezer.store.listing import (
    ListedVersion,
    loss_of,
    newest_versions,
    versions_of,
)
from freezer.store.local_files import (
    WORK,
    LocalFiles,
    one_spelling,
)
from freezer.store.oci_layout import (
    Descriptor,
)
from freezer.store.publication import (
    CANARY,
    HOOK,
    Move,
    announce,
    in_share,
    user_name,
)
from freezer.store.versions import (
    LATEST,
    NAME,
    Version,
)

__all__ = [
    "CANARY",
    "HOOK",
    "LATEST",
    "MARKS",
    "NAME",
    "WORK",
    "Cleaning",
    "Descriptor",
    "Form",
    "Garbage",
    "ListedVersion",
    "LocalFiles",
    "Move",
    "RemoteFiles",
    "Store",
    "Version",
    "announce",
    "collect",
    "copy_version",
    "in_share",
    "loss_of",
    "marks_in",
    "newest_versions",
    "one_spelling",
    "references",
    "user_name",
    "versions_of",
    "write_marks",
]
