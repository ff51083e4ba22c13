"""The manifest of an artifact: contract, payloads, requirements and evidence. Imports no torch.

`manifest.json` is the JSON form of `Manifest`. `format_version` increases when old readers would
misread it; readers reject versions that they do not know.

Weights are packed for one thread count and one shape. An artifact may have a set of payloads for
each of several thread counts; a set may have payloads for single points besides the one for all
sizes. The set is selected at load, the payload at each call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import PurePosixPath
from typing import Literal

from freezer.artifact.latency import LatencyRecord, PointFigures
from freezer.artifact.sections import (
    AccuracyRecord,
    DriftRecord,
    FreezingRecord,
    GateRecord,
    Needs,
    RecipeRecord,
)
from freezer.codec import OMIT_DEFAULT, JsonView, decode, encode, frozen, keyed_by, read_json
from freezer.errors import IntegrityError
from freezer.files import check_digest
from freezer.spec import Dim, InputSpec, OutputSpec, OutputStructure, Point

FORMAT_VERSION = 1

MAX_NAME_BYTES = 200

OWN_FILES = ("manifest.json", "signature.json")
"""Files of an artifact folder that the manifest does not list."""

PayloadKind = Literal["inductor", "torchscript", "exported", "onnxruntime", "openvino"]

ENGINES: Mapping[PayloadKind, str] = {"onnxruntime": "onnxruntime", "openvino": "openvino"}
"""The package that a payload needs besides torch, by kind; Coldpress has an extra of the same name
for it.
"""


@frozen
class FileRef:
    """A file of the artifact that is not a payload."""

    path: str
    digest: str
    size_bytes: int
    media_type: str


@frozen
class Payload:
    """A program for one device class, one thread count and one shape or range of shapes.

    Attributes:
        path: in the artifact folder.
        digest: `sha256:` and 64 hex digits.
        kind: which loader opens it.
        num_threads: intra-op threads that its packed weights are laid out for; None: any.
        dims: accepted sizes of every named dim; min equals max in a payload for one size.
        convention: `flat` takes the tensor inputs in order and returns the flat output tensors;
            `native` is called like the source.
        layouts: oneDNN's layout of its packed weights by dtype; empty if none are packed, None in
            manifests of earlier releases.
        weights: the file with its weights, named by its digest; None if they are in the payload.
    """

    path: str
    digest: str
    size_bytes: int
    kind: PayloadKind
    num_threads: int | None
    dims: tuple[Dim, ...] = field(default=(), metadata=keyed_by("name"))
    convention: Literal["flat", "native"] = "flat"
    layouts: Mapping[str, str] | None = None
    weights: FileRef | None = field(default=None, metadata=OMIT_DEFAULT)

    @property
    def first_point(self) -> Point:
        """The smallest sizes that it accepts."""
        return {dim.name: dim.min for dim in self.dims}

    def accepts(self, point: Point) -> bool:
        """Whether the payload accepts inputs of these sizes."""
        return all(point[dim.name] in dim.sizes for dim in self.dims)


@frozen
class GoldenSet:
    """One set of golden inputs and outputs: tensors `<index>/<name>` of golden/inputs.safetensors
    and outputs.safetensors.

    Attributes:
        point: sizes of the named dims.
        native_rmse: by output, root-mean-square distance of the eager model from the float64
            reference, or from itself if it draws random numbers; pooled over all judged sets then,
            and for outputs of fewer than 64 elements. Integers and bools have one only if the model
            draws them; they may then differ from the golden ones.
        scales: by output that mixes scales, the magnitudes from which values are judged apart from
            all smaller ones, ascending; the same in every set. `native_rmse` is then that of the
            smallest values.
        slice_errors: by output whose slices are judged apart (groups.py), the largest relative
            error of eager in a slice of the golden sets; the same in every set.
    """

    point: Point
    native_rmse: Mapping[str, float]
    scales: Mapping[str, tuple[float, ...]] = field(
        default_factory=dict,
        metadata=OMIT_DEFAULT,
    )
    slice_errors: Mapping[str, float] = field(
        default_factory=dict,
        metadata=OMIT_DEFAULT,
    )


@frozen
class Fallback:
    """The second artifact of a class, which needs torch alone, as earlier releases stored it: in
    the manifest of the first. It has an image of its own since.

    Attributes:
        recipe, payloads: as in Manifest.
        ms, speedup, speedup_ci, points: as in LatencyRecord.
    """

    recipe: RecipeRecord
    payloads: tuple[Payload, ...]
    ms: Mapping[str, float | None] = field(default_factory=dict)
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None
    points: tuple[PointFigures, ...] = ()


@frozen
class Manifest:
    """Description of an artifact.

    Attributes:
        verdict: why it is published.
        recipe, needs, drift, gate, freezing: see sections.py.
        latency: see latency.py; None if nothing was timed.
        inputs, outputs, structure: the contract of a call.
        payloads, files: all other files of the folder.
        golden: the golden sets, by index.
        reference: `float64`, or `eager` if float64 cannot run; determines the bounds of the canary.
        stateful: whether calls change the results of later calls.
        toolchain: versions of the tools that made it.
        provenance: source, weights digest, campaign, host.
        accuracy: what a lower precision costs; None for float32.
        fallback: read from manifests of earlier releases, never written.
        version: the version that first published it; None if never published.
    """

    model: str
    device_class: str
    verdict: str
    recipe: RecipeRecord
    inputs: InputSpec
    outputs: tuple[OutputSpec, ...]
    structure: OutputStructure
    payloads: tuple[Payload, ...]
    files: tuple[FileRef, ...]
    golden: tuple[GoldenSet, ...]
    reference: Literal["float64", "eager"]
    stateful: bool
    needs: Needs
    toolchain: JsonView
    drift: DriftRecord
    gate: GateRecord
    latency: LatencyRecord | None
    provenance: JsonView
    freezing: FreezingRecord = field(default_factory=FreezingRecord)
    accuracy: AccuracyRecord | None = field(default=None, metadata=OMIT_DEFAULT)
    fallback: Fallback | None = field(default=None, metadata=OMIT_DEFAULT)
    version: int | None = None
    format_version: int = FORMAT_VERSION

    @property
    def contents(self) -> tuple[Payload | FileRef, ...]:
        """Every file of the artifact except the manifest."""
        others = self.fallback.payloads if self.fallback else ()
        return (*files_of(self.payloads), *others, *self.files)

    @property
    def engines(self) -> tuple[str, ...]:
        """Packages that the payloads need besides torch."""
        return engines_of(self.payloads)

    def without_engine(self) -> Manifest | None:
        """The manifest of the second artifact, if an earlier release stored it in this one."""
        if self.fallback is None:
            return None
        other = self.fallback
        latency = self.latency and replace(
            self.latency,
            ms=other.ms,
            speedup=other.speedup,
            speedup_ci=other.speedup_ci,
            points=other.points,
            cold_start=None,
        )
        return replace(
            self,
            recipe=other.recipe,
            payloads=other.payloads,
            needs=replace(self.needs, packages={}),
            latency=latency,
            fallback=None,
        )

    def to_bytes(self) -> bytes:
        """The bytes of manifest.json: sorted keys, no NaN."""
        text = json.dumps(
            encode(self),
            indent=1,
            sort_keys=True,
            allow_nan=False,
        )
        return f"{text}\n".encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, origin: str) -> Manifest:
        """Parse the content of a manifest.json, which came from `origin`.

        Raises:
            IntegrityError: it is damaged, or of a later format.
        """
        parsed = read_json(data, origin=origin)
        if not isinstance(parsed, dict) or "format_version" not in parsed:
            raise IntegrityError(
                f"{origin} is not a Coldpress manifest: it lacks 'format_version'; pull the"
                " artifact again"
            )
        found = parsed["format_version"]
        if found != FORMAT_VERSION:
            raise IntegrityError(
                f"{origin}: format_version {found}, this release reads {FORMAT_VERSION}; upgrade"
                " coldpress"
            )
        manifest = decode(cls, parsed, origin=origin)
        check_paths([item.path for item in manifest.contents], origin=origin)
        for item in manifest.contents:
            check_digest(item.digest)
        return manifest


def weights_of(payloads: Sequence[Payload]) -> tuple[FileRef, ...]:
    """The files with the weights of payloads, which may share them."""
    return tuple(dict.fromkeys(item.weights for item in payloads if item.weights))


def files_of(payloads: Sequence[Payload]) -> tuple[Payload | FileRef, ...]:
    """Payloads, and the files with their weights."""
    return (*payloads, *weights_of(payloads))


def size_of(payloads: Sequence[Payload]) -> int:
    """The size of payloads and their weights, in bytes."""
    return sum(item.size_bytes for item in files_of(payloads))


def engines_of(payloads: Sequence[Payload]) -> tuple[str, ...]:
    """Packages that payloads need besides torch."""
    return tuple(
        dict.fromkeys(ENGINES[payload.kind] for payload in payloads if payload.kind in ENGINES)
    )


def check_paths(
    paths: Sequence[str],
    *,
    origin: str,
) -> None:
    """Check that files can be written under these paths of one folder, and under no other.

    Raises:
        IntegrityError: a path is absolute, contains `..`, is not a file name, or occurs twice or as
            the folder of another.
    """
    for path in paths:
        check_inside(path, origin=origin)
        if not path.isprintable() or any(
            len(part.encode()) > MAX_NAME_BYTES for part in PurePosixPath(path).parts
        ):
            raise IntegrityError(f"{origin} names {path!r:.80}, which is not a file name")
    names = [PurePosixPath(path) for path in (*paths, *OWN_FILES)]
    folders = {folder for name in names for folder in name.parents}
    if len(set(names)) < len(names) or folders & set(names):
        raise IntegrityError(
            f"{origin} names one file twice, or a file as a folder; pull the artifact again"
        )


def check_inside(path: str, *, origin: str) -> None:
    """Check that a path stays inside the artifact's folder.

    Raises:
        IntegrityError: it is absolute or contains `..`.
    """
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts or "\\" in path:
        raise IntegrityError(f"{origin} names {path!r}, which is outside the artifact's folder")


def version_tuple(version: str) -> tuple[int, int]:
    """Major and minor of a version of torch or of an engine."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
