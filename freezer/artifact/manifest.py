"""The manifest: what an artifact is, what it needs, and the evidence that it is right. Imports no torch.

`manifest.json` is the JSON form of `Manifest`. Its `format_version` is raised when an old reader would misread it; a reader
refuses versions that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from freezer.artifact.sections import DriftRecord, FreezingRecord, GateRecord, LatencyRecord, Needs, RecipeRecord
from freezer.codec import decode, encode, keyed_by
from freezer.errors import IntegrityError
from freezer.spec.inputs import Dim, InputSpec
from freezer.spec.outputs import OutputSpec, OutputStructure

FORMAT_VERSION = 1

PayloadKind = Literal["inductor", "torchscript", "exported"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """One opened thing, made for one device class, one thread count and one shape or range of shapes.

    Attributes:
        path: in the artifact folder.
        digest: `sha256:` and 64 hex digits.
        kind: which lowering opens it.
        num_threads: the intra-op threads that its packed weights are laid out for; None where it is specialized on none.
        dims: the sizes it accepts for every named dim; min equals max where the payload is for one size.
        convention: `flat` takes the tensor inputs in order and gives the flat output tensors; `native` is called as the
            source model is.
        layouts: how its packed weights are laid out, by dtype, as oneDNN must expect them; empty where none are packed, None in
            manifests of before that was recorded.
    """

    path: str
    digest: str
    size_bytes: int
    kind: PayloadKind
    num_threads: int | None
    dims: tuple[Dim, ...] = field(default=(), metadata=keyed_by("name"))
    convention: Literal["flat", "native"] = "flat"
    layouts: Mapping[str, str] | None = None

    def accepts(self, point: Mapping[str, int]) -> bool:
        """Whether the payload serves inputs of these sizes."""
        return all(point[dim.name] in dim.sizes for dim in self.dims)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRef:
    """A file of the artifact other than a payload."""

    path: str
    digest: str
    size_bytes: int
    media_type: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenSet:
    """One set of golden inputs and outputs: tensors `<index>/<name>` of golden/inputs.safetensors and outputs.safetensors.

    Attributes:
        point: the sizes of the named dims in this set.
        native_rmse: of each output, the eager model's root-mean-square distance from the float64 reference, and from itself
            where it draws by chance; pooled over all judged sets there, and where an output has fewer than 64 elements.
    """

    point: Mapping[str, int]
    native_rmse: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All that is known about an artifact.

    Attributes:
        model, device_class, verdict: what this is, for whom, and why it is published.
        version: the version it was first published in; None in an artifact that was never published.
        needs: `torch` (least version), `machine` (archspec's name) and, of a GPU's, `cuda` (see cuda_requirements.py), by name.
        recipe: name, capture, lowering and settings, and for each capture that was tried its outcome.
        inputs, outputs, structure: the contract of a call.
        stateful: whether calls change what later calls answer.
        payloads, files: everything in the folder besides this manifest, by digest.
        golden: the golden sets, in the order of their indices.
        reference: `float64`, or `eager` where float64 cannot run; settles which bounds the canary applies.
        toolchain: versions that made it.
        drift, latency: the judged figures; `gate` the limits they were held to.
        provenance: source, weights digest, campaign, host.
        freezing: what freezing did.
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
    toolchain: Mapping[str, Any]
    drift: DriftRecord
    gate: GateRecord
    latency: LatencyRecord | None
    provenance: Mapping[str, Any]
    freezing: FreezingRecord = field(default_factory=FreezingRecord)
    version: int | None = None
    format_version: int = FORMAT_VERSION

    @property
    def contents(self) -> tuple[Payload | FileRef, ...]:
        """Every file of the artifact but the manifest itself."""
        return (*self.payloads, *self.files)

    def to_bytes(self) -> bytes:
        """manifest.json, byte for byte: sorted keys, no NaN."""
        return (json.dumps(encode(self), indent=1, sort_keys=True, allow_nan=False) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, origin: str) -> Manifest:
        """The manifest that `to_bytes` wrote.

        Args:
            data: the content of a manifest.json.
            origin: where it came from, for the message.

        Raises:
            IntegrityError: it is no manifest, or one of a later format.
        """
        try:
            parsed = json.loads(data)
            found = parsed["format_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{origin} is not a Coldpress manifest: {error}; pull the artifact again") from None
        if found != FORMAT_VERSION:
            raise IntegrityError(f"{origin}: format_version {found}, this release reads {FORMAT_VERSION}; upgrade coldpress")
        return decode(cls, parsed, origin=origin)


def version_tuple(version: str) -> tuple[int, int]:
    """Major and minor of a torch version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
