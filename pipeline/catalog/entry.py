"""Entry: one model of a catalog, checked as far as possible without loading it.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from freezer.freezing.sources import Source
from freezer.spec import InputSpec, Limits, Objective
from pipeline.records import SOURCE_MODEL, SOURCE_VERSION

if TYPE_CHECKING:
    from pipeline.tracking import RegistryModel

SOURCE_RUN = "coldpress.source_run"
"""Tag: the run that logged a registry version.

A recreated registry counts its versions from 1 again.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One model of a catalog.

    Attributes:
        name: of the model in the store, and in MLflow unless `registered_name` is set.
        source: of the model.
        spec: of its inputs; None takes them from the samples or the source.
        samples: file with real input sets, or its URL.
        task_metric: `MODULE:FUNCTION`, see `freezer.freezing.judging.session.TaskMetric`.
        objective: what the published candidate is best in, of those that meet the limits.
        limits, device_classes, recipes: as requested; `auto` is resolved once the nodes are known.
        files: read by a python source besides its module; part of its key.
        search_path: folders to search for python modules.
        registered_name: of the model in MLflow; None means `name`.
        tags: set on every run and version in MLflow.
        fill_up: whether to add generated input sets to the samples, which are one example.
        preserve: attributes and methods, also of submodules, that stay readable, settable and
            callable.
        reset: method that clears the state of a stateful model.
        threads: counts to build and judge for, the deciding one first; empty means `counts_within`
            the CPUs of the workers.
        points: sizes by dim name, the deciding one first; empty means the smallest size of every
            dim.
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
    objective: Objective = "p50"


def of_version(entry: Entry, model: RegistryModel) -> Entry:
    """Return an entry whose source is one version of a registry model."""
    tags = {**entry.tags, SOURCE_MODEL: model.name, SOURCE_VERSION: model.version}
    if model.run_id:
        tags[SOURCE_RUN] = model.run_id
    source = replace(entry.source, location=model.model_uri)
    return replace(entry, source=source, tags=tags)
