"""Manifests of infra, and what they are compared with: schemas, pins, and classes of the fleet."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from packaging.utils import canonicalize_name

from freezer.hardware import DEVICE_CLASSES, PORTABLE, can_run
from pipeline.records import LABEL
from tests.support.raylets import ROOT

KUBERNETES = "1.33"
"""The release whose schemas decide; an unknown field is an error."""

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINES = (ROOT / "constraints.txt").read_text().splitlines()
PINS = [line.partition("==") for line in LINES if not line.startswith("#")]
PINNED: dict[str, str] = {canonicalize_name(name): version for name, _, version in PINS}
"""Version of each package, by its canonical name."""

FLEET = [name for name in DEVICE_CLASSES if name not in {PORTABLE, "cpu-cooperlake"}]
"""Classes that have machines of their own. No common instance type has CPUs of cpu-cooperlake;
machines of cpu-sapphirerapids serve it.
"""


def labels_of(name: str) -> dict[str, str]:
    """Return the labels of a class's machines: all classes that a CPU serves; on a machine with a
    GPU not those of its CPU, whose work goes to other machines.
    """
    served = [name]
    if DEVICE_CLASSES[name].kind == "cpu":
        served = [other for other in DEVICE_CLASSES if other != PORTABLE and can_run(other, name)]
    return {f"{LABEL}{other}": "true" for other in served}


def manifests(path: Path) -> list[dict[str, Any]]:
    """The documents of a file, in order; those of a list one by one."""
    documents: list[dict[str, Any]] = []
    for document in yaml.safe_load_all(path.read_text()):
        if document is not None:
            documents += document["items"] if document["kind"] == "List" else [document]
    return documents


def check_manifest(item: dict[str, Any]) -> None:
    """Check a manifest of one of Kubernetes' own kinds.

    Raises:
        kubernetes_validate.ValidationError: the schema does not allow it.
    """
    kubernetes_validate.validate(item, KUBERNETES, strict=True)
