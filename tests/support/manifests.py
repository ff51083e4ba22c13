"""Kubernetes manifests, and the schemas of a Kubernetes release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

KUBERNETES = "1.33"
"""The release whose schemas decide; an unknown field is an error."""


def manifests(path: Path) -> list[dict[str, Any]]:
    """The documents of a file, in order."""
    return [item for item in yaml.safe_load_all(path.read_text()) if item is not None]


def check_manifest(item: dict[str, Any]) -> None:
    """Check a manifest of one of Kubernetes' own kinds.

    Raises:
        kubernetes_validate.ValidationError: the schema does not allow it.
    """
    kubernetes_validate.validate(item, KUBERNETES, strict=True)
