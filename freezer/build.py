"""Build a candidate: one recipe, one model, one target."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from freezer.capture import Captured, capture
from freezer.errors import BuildError
from freezer.frozen_model import FrozenModel, OpenPayload
from freezer.manifest import Payload, digest_file
from freezer.recipes import LOWERINGS, LoweringName, Recipe
from freezer.sources import weights_digest
from freezer.spec import Dim
from freezer.subject import Subject
from freezer.target import Target, threads, toolchain

CANDIDATE = "candidate.json"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What one recipe made of one model for one device class: a folder of payloads, and how they came to be.

    Attributes:
        folder: holds candidate.json and payloads/.
        recipe, lowering, capture: names.
        tried: for each capture that was tried, in order, its name and outcome.
        payloads: the most special shapes first.
        stateful: whether the graph says that a call changes buffers.
        warnings: what the capture said.
        toolchain: versions that made it.
        weights: digest of the weights that it was made of.
        build_s: wall time of the whole build, in seconds.
    """

    folder: Path
    recipe: str
    lowering: str
    capture: str
    settings: Mapping[str, Any]
    tried: tuple[Mapping[str, str], ...]
    payloads: tuple[Payload, ...]
    stateful: bool
    warnings: tuple[str, ...]
    toolchain: Mapping[str, Any]
    weights: str
    build_s: float

    def open(self, subject: Subject) -> FrozenModel:
        """The candidate as it would be served, in its initial state."""
        lowering = lowering_module(self.payloads[0].kind)
        opened = [OpenPayload(payload=p, run=lowering.open_payload(self.folder / p.path)) for p in self.payloads]
        return FrozenModel(spec=subject.spec, outputs=subject.outputs, structure=subject.structure, payloads=opened)

    def write(self) -> None:
        """Write candidate.json beside the payloads."""
        record = {
            "recipe": self.recipe,
            "lowering": self.lowering,
            "capture": self.capture,
            "settings": dict(self.settings),
            "tried": [dict(item) for item in self.tried],
            "payloads": [payload.to_json() for payload in self.payloads],
            "stateful": self.stateful,
            "warnings": list(self.warnings),
            "toolchain": dict(self.toolchain),
            "weights": self.weights,
            "build_s": self.build_s,
        }
        (self.folder / CANDIDATE).write_text(json.dumps(record, indent=1, sort_keys=True))

    @classmethod
    def read(cls, folder: Path) -> Candidate:
        """The candidate that `write` wrote; raises FileNotFoundError where there is none."""
        record = json.loads((folder / CANDIDATE).read_text())
        payloads = tuple(Payload.from_json(item) for item in record["payloads"])
        lists = {name: tuple(record[name]) for name in ("tried", "warnings")}
        return cls(folder=folder, **{**record, **lists, "payloads": payloads})


def build(subject: Subject, recipe: Recipe, target: Target, folder: Path) -> Candidate:
    """Capture the subject, lower the graph, and write the payloads.

    Args:
        subject: the model; it is not changed.
        recipe: of RECIPES.
        target: a class whose limits this process holds.
        folder: an existing folder, empty, which becomes the candidate's.

    Raises:
        CaptureError: no capture that the recipe allows works.
        BuildError: the lowering fails, or does not keep the model's state.
    """
    started = time.monotonic()
    (folder / "payloads").mkdir()
    payloads: list[Payload] = []
    tried: list[dict[str, str]] = []
    last: Captured | None = None
    with threads(target.num_threads):
        for name, point in _shapes(subject, recipe):
            last, outcomes = capture(subject, [way[0] for way in recipe.ways], point=point)
            tried.extend(outcomes)
            lowering: LoweringName = dict(recipe.ways)[last.name]
            module = lowering_module(lowering)
            path = folder / "payloads" / f"{name}{module.SUFFIX}"
            module.build(last, path, target, recipe.settings)
            payloads.append(_payload(subject, recipe, target, path, lowering, point, last))
    if last is None:
        raise BuildError(f"{recipe.name}: nothing to build")
    candidate = Candidate(
        folder=folder,
        recipe=recipe.name,
        lowering=lowering,
        capture=last.name,
        settings=recipe.settings,
        tried=tuple(tried),
        payloads=tuple(payloads),
        stateful=bool(last.mutates),
        warnings=last.warnings,
        toolchain=toolchain(),
        weights=weights_digest(subject.model),
        build_s=time.monotonic() - started,
    )
    candidate.write()
    return candidate


def lowering_module(kind: LoweringName) -> ModuleType:
    """The module that builds and opens a kind of payload; imported when first needed."""
    return importlib.import_module(LOWERINGS[kind])


def _shapes(subject: Subject, recipe: Recipe) -> list[tuple[str, dict[str, int] | None]]:
    """Name and point of each payload to build; no point means all sizes. The most special comes first."""
    if not any(dim.min < dim.max for dim in subject.spec.dims):
        return [("all", None)]
    if not recipe.by_shape:
        return [("all", None)]
    point = subject.spec.first_point()
    return [("-".join(f"{name}{size}" for name, size in point.items()), point), ("all", None)]


def _payload(
    subject: Subject,
    recipe: Recipe,
    target: Target,
    path: Path,
    kind: LoweringName,
    point: dict[str, int] | None,
    captured: Captured,
) -> Payload:
    dims = subject.spec.dims
    if point is not None:
        dims = tuple(Dim(name=name, min=size, max=size) for name, size in point.items())
    return Payload(
        path=f"payloads/{path.name}",
        digest=digest_file(path),
        size_bytes=path.stat().st_size,
        kind=kind,
        num_threads=target.num_threads if recipe.by_thread else None,
        dims=dims,
        convention=captured.convention,
    )
