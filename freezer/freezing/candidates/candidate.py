"""A candidate: the payloads that one recipe made of one model, and the record of the build. And the
architecture of a model: what was measured of one can be expected of others with the same digest.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path

from torch import nn

from freezer.artifact import (
    Artifact,
    Dropped,
    FreezingReport,
    Payload,
    payloads_for_threads,
    size_of,
)
from freezer.codec import JsonView, decode, encode, frozen
from freezer.errors import ColdpressError
from freezer.files import check_folder, link_or_copy, make_folder, read_document
from freezer.freezing.in_hand import take
from freezer.freezing.models import Subject
from freezer.freezing.recipes import RECIPES, Settings
from freezer.freezing.target import Target, toolchain
from freezer.runtime.contract import OpenPayload
from freezer.runtime.frozen_model import CallOptions, FrozenModel
from freezer.runtime.loaders import LOADERS
from freezer.spec import FLOAT32

CANDIDATE = "candidate.json"

EVIDENCE = "evidence"
"""Folder of a candidate with texts: errors in full, and code and graphs from captures and
lowerings.
"""


@frozen
class Candidate:
    """The payloads that one recipe made of one model for one device class.

    Attributes:
        folder: contains candidate.json and payloads/.
        recipe, lowering, capture: names.
        tried: each attempted way in order: payload, capture, lowering, and the outcome in a
            sentence.
        payloads: by thread count, in the order of the target; for one count the most special shapes
            first.
        reports: what freezing did, by payload path.
        warnings: warnings of the capture.
        toolchain: versions that built it.
        weights: digest of the model's weights.
        preserve: attributes and methods that the payload keeps, including the reset method.
        build_s: wall time of the whole build, in seconds.
    """

    folder: Path
    recipe: str
    lowering: str
    capture: str
    settings: Settings
    tried: tuple[Mapping[str, str], ...] = ()
    payloads: tuple[Payload, ...]
    reports: Mapping[str, FreezingReport] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    toolchain: JsonView
    weights: str = ""
    build_s: float = 0.0
    preserve: tuple[str, ...] = ()
    precision: str = FLOAT32

    @property
    def size_bytes(self) -> int:
        """Size of all payloads with their weights."""
        return size_of(self.payloads)

    def shortened_reports(self, *max_listed: int) -> dict[str, FreezingReport]:
        """The reports with shortened lists."""
        return {path: report.shortened(*max_listed) for path, report in self.reports.items()}

    def without(self, dropped: Iterable[Dropped]) -> Candidate:
        """The candidate without dropped payloads; their files stay."""
        paths = [each.payload for each in dropped]
        payloads = tuple(payload for payload in self.payloads if payload.path not in paths)
        reports = {path: report for path, report in self.reports.items() if path not in paths}
        return replace(self, payloads=payloads, reports=reports)

    def link_files(self, folder: Path) -> None:
        """Link its payloads and texts into a folder."""
        for part in ("payloads", EVIDENCE):
            for file in (self.folder / part).glob("*"):
                link_or_copy(file, folder / part / file.name)

    def open(self, subject: Subject, payloads: Sequence[Payload] | None = None) -> FrozenModel:
        """Open the candidate as it would serve, in its initial state.

        Args:
            subject: the subject it was made of, on the device to run on.
            payloads: payloads to choose from by shape; by default all for the first thread count.
        """
        if payloads is None:
            payloads = payloads_for_threads(self.payloads, self.payloads[0].num_threads or 0)
        opened = []
        take(self.recipe, "opening")
        for payload in payloads:
            load = LOADERS[payload.kind]
            run = load(self.folder / payload.path, self.settings, subject.device)
            opened.append(OpenPayload(payload=payload, run=run))
        take(self.recipe, "validating")
        return FrozenModel(
            spec=subject.spec,
            outputs=subject.outputs,
            structure=subject.structure,
            payloads=opened,
            options=CallOptions(
                preserve=self.preserve, device=subject.device, precision=self.precision
            ),
        )

    def write(self) -> None:
        """Write candidate.json beside the payloads."""
        record = encode(self)
        del record["folder"]
        (self.folder / CANDIDATE).write_text(
            json.dumps(
                record,
                indent=1,
                sort_keys=True,
            )
        )

    @classmethod
    def read(cls, folder: Path) -> Candidate:
        """Read what `write` wrote. Unknown fields are ignored: a store keeps candidates of earlier
        versions.

        Raises:
            FileNotFoundError: the folder has no candidate.json.
            IntegrityError: candidate.json is damaged.
        """
        path = folder / CANDIDATE
        record = json.loads(read_document(path))
        return decode(cls, {**record, "folder": folder}, origin=str(path))


def architecture_digest(subject: Subject, target: Target) -> str:
    """Digest of a model's modules, the names, dtypes and shapes of its tensors, its inputs and
    points.

    What turns it into candidates is part of it: the toolchain and all recipes. So figures of other
    versions are not compared.
    """
    model = subject.model
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    kinds = set(map(type, model.modules()))
    parts = {
        "modules": [(name, *_texts(module)) for name, module in model.named_modules()],
        "tensors": [(name, str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors],
        "code": sorted(_code(kind) for kind in kinds if not kind.__module__.startswith("torch.")),
        "inputs": encode(subject.spec),
        "points": subject.points,
        "toolchain": toolchain(target.device),
        "recipes": [encode(recipe) for recipe in RECIPES.values()],
    }
    return hashlib.sha256(
        json.dumps(
            parts,
            sort_keys=True,
            default=str,
        ).encode()
    ).hexdigest()


def _texts(module: nn.Module) -> list[str]:
    """The class of a module, and its settings, like those of a convolution; without these if its
    own method for them fails.
    """
    name = type(module).__qualname__
    with suppress(Exception):  # the user's code
        return [name, module.extra_repr()]
    return [name]


def _code(kind: type) -> str:
    """The source of a class; empty if there is none."""
    with suppress(OSError, TypeError):
        return inspect.getsource(kind)
    return ""


OPTIONS = "options.json"
"""File of the command `coldpress freeze` with its options."""

_KEY = "builds.key"
"""File with the digest of everything that the builds of a class depend on."""


def builds_of(out: Path) -> Path:
    """The folder beside an artifact folder for its builds."""
    return out.with_name(f"{out.name}.builds")


def check_out(out: Path, name: str) -> None:
    """Check that a freeze can write a folder: as `check_folder`, or it holds an artifact whose
    speed was not measured, which is replaced.
    """
    if not _is_unmeasured(out):
        check_folder(out, name)


def clear_out(out: Path) -> None:
    """Remove the artifact of a folder if its speed was not measured."""
    if _is_unmeasured(out):
        shutil.rmtree(out)


def _is_unmeasured(out: Path) -> bool:
    """Whether a folder has an artifact that serves until the timing is repeated: an unstable one,
    or `portable` beside kept builds.
    """
    with suppress(ColdpressError):
        return Artifact.read(out).manifest.verdict == "unstable" or bool(_kept(out))
    return False


def _kept(out: Path) -> list[Path]:
    """The folders of classes with kept builds."""
    return [key.parent for key in builds_of(out).glob(f"*/{_KEY}")]


def drop_builds(out: Path) -> None:
    """Remove the kept builds; nothing else in that folder is ours."""
    for folder in _kept(out):
        shutil.rmtree(folder)
    (builds_of(out) / OPTIONS).unlink(missing_ok=True)
    with suppress(OSError):
        builds_of(out).rmdir()


def kept_builds(out: Path, subject: Subject, target: Target) -> Path | None:
    """The folder with the builds of a class that an earlier freeze kept; None if there is none, or
    they are of another model, target or toolchain.
    """
    folder = builds_of(out) / target.device_class.name
    with suppress(OSError):
        if (folder / _KEY).read_text() == _key(subject, target):
            return folder
    return None


def keep_builds(out: Path, subject: Subject, target: Target, builds: Iterable[Path]) -> None:
    """Move the folders of builds to where `kept_builds` finds them, and remove others."""
    folder = builds_of(out) / target.device_class.name
    if kept_builds(out, subject, target) is None:
        shutil.rmtree(folder, ignore_errors=True)
    make_folder(folder)
    for build in builds:
        if build.parent != folder:
            shutil.move(build, folder / build.name)
    (folder / _KEY).write_text(_key(subject, target))


def _key(subject: Subject, target: Target) -> str:
    parts = [
        architecture_digest(subject, target),
        subject.weights,
        target.thread_counts,
        subject.kept_names,
        subject.reset,
        subject.held_out.digest if subject.held_out else None,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
