"""Sources: resolve the sources of entries, and bring them to the workers.

May import: pipeline.planning and below.
Read first: materials.py.
"""

from pipeline.sources.materials import (
    Materials,
)
from pipeline.sources.transfer import (
    download_sources,
    named_files,
)

__all__ = [
    "Materials",
    "download_sources",
    "named_files",
]
