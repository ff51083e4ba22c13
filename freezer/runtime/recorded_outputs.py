"""Outputs of an artifact's own payloads for the golden inputs, recorded by its judge: evidence/outputs.safetensors.

The golden outputs are the reference's; these are the device class's own, so that `coldpress diff` can compare the classes of a
version without their hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from freezer.artifact.folder import OWN_OUTPUTS
from freezer.runtime.tensor_files import save_tensors

OWN_OUTPUT_BYTES = 8 * 1024 * 1024
"""Bound of the file's outputs, of which the smallest are kept."""


def kept_of(names: Sequence[str], leaves: Sequence[Tensor]) -> dict[str, Tensor]:
    """Outputs of one call by name, without those that exceed the bound alone."""
    return {name: leaf for name, leaf in zip(names, leaves, strict=True) if leaf.nbytes <= OWN_OUTPUT_BYTES}


def write_own_outputs(answers: Sequence[Mapping[str, Tensor]], folder: Path) -> None:
    """Write tensors `<set>/<output>` within the bound.

    Args:
        answers: outputs by name of each golden set, in order.
        folder: of the artifact.
    """
    tensors = {f"{index}/{name}": tensor for index, outputs in enumerate(answers) for name, tensor in outputs.items()}
    path = folder / OWN_OUTPUTS
    path.parent.mkdir(exist_ok=True)
    kept = within(tensors, OWN_OUTPUT_BYTES)
    save_tensors({name: tensor for name, tensor in tensors.items() if name in kept}, path)


def within(tensors: Mapping[str, Tensor], num_bytes: int) -> set[str]:
    """Names of the smallest tensors that fit into a number of bytes."""
    kept: set[str] = set()
    for name in sorted(tensors, key=lambda name: tensors[name].nbytes):
        num_bytes -= tensors[name].nbytes
        if num_bytes < 0:
            break
        kept.add(name)
    return kept
