"""Stores: versions, the OCI layout, folders, buckets and registries, and the cache of blobs.

May import: freezer.artifact and below. Imports no torch.
Read first: artifact_store.py.
"""

from freezer.store.artifact_store import (
    WORK,
    Store,
)
from freezer.store.bucket import (
    RemoteFiles,
)
from freezer.store.copying import (
    Copied,
    Form,
    copy_version,
    references,
)
from freezer.store.listing import (
    ListedVersion,
    loss_of,
    newest_versions,
    versions_of,
)
from freezer.store.local_files import (
    LocalFiles,
    one_spelling,
)
from freezer.store.oci_layout import (
    INDEX,
    Descriptor,
)
from freezer.store.versions import (
    LATEST,
    NAME,
    Version,
)

__all__ = [
    "INDEX",
    "LATEST",
    "NAME",
    "WORK",
    "Copied",
    "Descriptor",
    "Form",
    "ListedVersion",
    "LocalFiles",
    "RemoteFiles",
    "Store",
    "Version",
    "copy_version",
    "loss_of",
    "newest_versions",
    "one_spelling",
    "references",
    "versions_of",
]
