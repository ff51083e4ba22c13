"""Catalog: files, entries and their fields, and registries as catalogs.

May import: pipeline.tracking and below.
Read first: reading.py.
"""

from pipeline.catalog.files import (
    PYTHON,
    CatalogEntry,
    read_file,
)
from pipeline.catalog.reading import (
    SOURCE_RUN,
    Catalog,
    Entry,
    is_registry,
    of_version,
    read_catalog,
    read_entries,
    read_registry,
    refuse_bad_entries,
)

__all__ = [
    "PYTHON",
    "SOURCE_RUN",
    "Catalog",
    "CatalogEntry",
    "Entry",
    "is_registry",
    "of_version",
    "read_catalog",
    "read_entries",
    "read_file",
    "read_registry",
    "refuse_bad_entries",
]
