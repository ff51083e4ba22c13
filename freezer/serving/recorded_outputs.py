"""Golden outputs of a class: those of the reference, and its own as the judge recorded them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from freezer.artifact import (
    GOLDEN_INPUTS,
    GOLDEN_OUTPUTS,
    OWN_OUTPUTS,
    FileRef,
    GoldenSet,
    Manifest,
)
from freezer.compare import Values
from freezer.compare.tensor_values import values_of
from freezer.runtime.tensor_files import golden_inputs, golden_outputs, load_tensors, own_outputs
from freezer.runtime.tensors import bytes_of
from freezer.store import Store, Version

Outputs = Mapping[str, Values]
"""Values by name of the output."""


@dataclass(frozen=True, kw_only=True)
class GoldenAnswers:
    """Outputs of a golden set by the reference and by a class, and eager's errors."""

    reference: Outputs
    own: Outputs
    recorded: GoldenSet


@dataclass(frozen=True, kw_only=True)
class ClassOutputs:
    """The outputs of a class of a version.

    Attributes:
        answers: by the digest of the inputs.
        note: how many outputs were not recorded; empty if all were.
    """

    manifest: Manifest
    answers: Mapping[str, GoldenAnswers]
    note: str

    @property
    def name(self) -> str:
        """The device class."""
        return self.manifest.device_class


def read_outputs(
    store: Store,
    version: Version,
    manifest: Manifest,
) -> ClassOutputs:
    """Read the golden tensors of a class, after their digests are verified.

    Raises:
        IntegrityError: a file differs from the published one.
    """
    paths = {file.path: store.file(version, file) for file in manifest.files if _is_read(file)}
    inputs = golden_inputs(manifest, paths[GOLDEN_INPUTS], load_tensors)
    golden = golden_outputs(manifest, paths[GOLDEN_OUTPUTS], load_tensors)
    own = own_outputs(paths[OWN_OUTPUTS], golden)
    answers = {}
    for index, tensors in enumerate(inputs):
        answers[_digest(tensors)] = GoldenAnswers(
            reference=_values(golden[index]),
            own=_values(own[index]),
            recorded=manifest.golden[index],
        )
    num_outputs = sum(map(len, golden))
    num_missing = num_outputs - sum(map(len, own))
    note = ""
    if num_missing:
        note = f"{manifest.device_class}: {num_missing} of {num_outputs} outputs are missing"
    return ClassOutputs(
        manifest=manifest,
        answers=answers,
        note=note,
    )


def _is_read(file: FileRef) -> bool:
    return file.path in (GOLDEN_INPUTS, GOLDEN_OUTPUTS, OWN_OUTPUTS)


def _values(tensors: Mapping[str, Tensor]) -> Outputs:
    return {name: values_of(tensor) for name, tensor in tensors.items()}


def _digest(inputs: Mapping[str, Tensor]) -> str:
    """Digest of the inputs of one set."""
    digest = hashlib.sha256()
    for name, tensor in sorted(inputs.items()):
        shape = tuple(tensor.shape)
        header = f"{name}\0{tensor.dtype}\0{shape}\0"
        values = bytes_of(tensor).numpy()
        digest.update(header.encode())
        digest.update(values.tobytes())
    return digest.hexdigest()
