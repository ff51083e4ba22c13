"""Completion of arguments in a shell: models of a store in a folder, and device classes."""

from __future__ import annotations

from contextlib import suppress
from urllib.parse import urlparse

import typer

from freezer.errors import ColdpressError
from freezer.files import SCHEMES
from freezer.hardware import DEVICE_CLASSES
from freezer.store import Store


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    """Names of the models in the folder of --store, by default ./store; none of a bucket, which
    would take too long to list.
    """
    uri = context.params.get("store") or "./store"
    if urlparse(uri).scheme in SCHEMES:
        return []
    with suppress(ColdpressError):
        return [name for name in Store.open(uri).models() if name.startswith(incomplete)]
    return []


def complete_class(incomplete: str) -> list[str]:
    """Names of device classes."""
    return [name for name in DEVICE_CLASSES if name.startswith(incomplete)]
