"""Entries: one model of a catalog, checked as far as can be told without loading it. Imports no torch.

What comes from outside is parsed by pydantic at the door; the plain dataclass Entry goes on from there. Every complaint names the
entry, the field, what it got, what was expected and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.freezing.models.sources import Source
from freezer.limits import Limits
from freezer.spec.inputs import InputSpec

if TYPE_CHECKING:
    from pipeline.tracking.source_models import RegistryModel

SOURCE_RUN = "coldpress.source_run"
"""The tag with the run that made a registry's version: a registry that was made anew counts its versions from 1 again."""

SOURCE_MODEL, SOURCE_VERSION = "coldpress.source_model", "coldpress.source_version"
"""Tags of what was made of a registry's model: its own name, and the version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One model of a catalog.

    Attributes:
        name: of the model in the store, and unless it comes from the registry in MLflow.
        source: where it comes from.
        spec: of its inputs; None means: as the samples are, or as the source itself says.
        samples: file of real input sets, or its URL.
        task_metric: `MODULE:FUNCTION`, see `freezer.freezing.validation.judge.TaskMetric`.
        limits, device_classes, recipes: what was asked for; `auto` is resolved when the machines are known.
        files: what a python source reads besides its module; part of its key.
        search_path: folders in which python modules are looked for.
        registered_name: of the model in MLflow; None is its name.
        tags: shown in MLflow with every run and version.
        fill_up: whether generated input sets join the samples, which are one example and not a sample of the world.
        preserve: attributes, methods and attributes of submodules that stay readable, settable and callable.
        reset: the method that clears a stateful model's state.
        threads: counts to build and judge for, the deciding one first; none means what the workers of a class have.
        points: sizes by dim name, likewise; none means every dim at its least.
    """

    name: str
    source: Source
    spec: InputSpec | None
    samples: Path | str | None
    task_metric: str | None
    limits: Limits
    device_classes: tuple[str, ...]
    recipes: tuple[str, ...]
    files: tuple[Path, ...]
    search_path: tuple[str, ...]
    registered_name: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    fill_up: bool = False
    preserve: tuple[str, ...] = ()
    reset: str | None = None
    threads: tuple[int, ...] = ()
    points: tuple[Mapping[str, int], ...] = ()


def of_version(entry: Entry, model: RegistryModel) -> Entry:
    """An entry whose source is one version of a registry's model."""
    tags = {**entry.tags, SOURCE_MODEL: model.name, SOURCE_VERSION: model.version}
    if model.run_id:
        tags[SOURCE_RUN] = model.run_id
    source = replace(entry.source, location=model.model_uri)
    return replace(entry, source=source, tags=tags)
