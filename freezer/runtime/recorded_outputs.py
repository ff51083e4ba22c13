"""What an artifact's own payloads answered to the golden inputs when they were judged: evidence/outputs.safetensors.

The golden outputs are the reference's. These are of the device class itself, under its limits, on the hardware of its judge, so
that the classes of a version can be held against each other (`coldpress diff`) without any of their hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from freezer.artifact.folder import OWN_OUTPUTS
from freezer.runtime.tensor_files import save_tensors

OWN_OUTPUT_BYTES = 8 * 1024 * 1024
"""Outputs are kept, least first, while all of them stay below this; the others are left out of the file."""


def kept_of(names: Sequence[str], leaves: Sequence[Tensor]) -> dict[str, Tensor]:
    """The outputs of one call, by name, without those that are too large to be kept whatever the others are."""
    return {name: leaf for name, leaf in zip(names, leaves, strict=True) if leaf.nbytes <= OWN_OUTPUT_BYTES}


def write_own_outputs(answers: Sequence[Mapping[str, Tensor]], folder: Path) -> None:
    """Write tensors `<set>/<output>`, within the bound; which are left out shows in the manifest's golden sets and outputs.

    Args:
        answers: to each golden set, in order, the outputs by name.
        folder: of the artifact.
    """
    tensors = {f"{index}/{name}": tensor for index, outputs in enumerate(answers) for name, tensor in outputs.items()}
    path = folder / OWN_OUTPUTS
    path.parent.mkdir(exist_ok=True)
    kept = within(tensors, OWN_OUTPUT_BYTES)
    save_tensors({name: tensor for name, tensor in tensors.items() if name in kept}, path)


def within(tensors: Mapping[str, Tensor], num_bytes: int) -> set[str]:
    """The names of the smallest tensors that together take no more than so many bytes; of equal ones the first."""
    kept: set[str] = set()
    for name in sorted(tensors, key=lambda name: tensors[name].nbytes):
        num_bytes -= tensors[name].nbytes
        if num_bytes < 0:
            break
        kept.add(name)
    return kept
