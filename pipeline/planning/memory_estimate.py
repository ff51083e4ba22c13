"""Estimate the memory that a build or judge requests from its node, without loading the model.

Ray uses the request for placement only; worker/sandbox.py limits the child. The estimate only has
to keep a node from running ten large models at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from freezer.freezing.sources import FILE_KINDS
from pipeline.catalog import Entry

BASE_BYTES = 1_000_000_000
"""Memory of a child with torch and its compiler, and the estimate of a model without weight files.
"""

PER_WEIGHT = 4
"""Copies of the weights: the measured peak of a build is up to 3.4 above its baseline; a judge
holds the model twice, and once in float64."""

STEP_BYTES = 1_000_000_000
"""Demands are rounded up to a power of two of this, since Ray keeps one queue for each distinct
demand.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Memory of one item, in bytes.

    Attributes:
        asked: requested from Ray, if a node has as much.
        least: required; a node that has less is not used.
        firm: `asked` corrects a failure for lack of memory: if no node has as much, only the
            largest is used.
    """

    asked: int
    least: int
    firm: bool = False


def demand_of(entry: Entry) -> Demand:
    """Return the demand of an entry whose files are here."""
    if entry.limits.memory_gb is not None:
        given = int(entry.limits.memory_gb * 1e9)
        return Demand(asked=given, least=given)
    weights = _weights_bytes(entry)
    return Demand(asked=_step(BASE_BYTES + PER_WEIGHT * weights), least=weights)


def corrected(demand: Demand, size: int) -> Demand:
    """Return a demand of at least `size` bytes, after a failure."""
    return replace(demand, asked=max(size, demand.asked), firm=True)


def learned(demand: Demand, used_bytes: int) -> Demand:
    """Return a demand that covers the measured memory of a task of the same model."""
    return demand if used_bytes <= demand.asked else replace(demand, asked=_step(used_bytes))


def _weights_bytes(entry: Entry) -> int:
    """Return the size of the files of a model; 0 if it is not known yet."""
    location = Path(entry.source.location)
    files = [*entry.files]
    if entry.source.kind in FILE_KINDS:
        files.append(location)
    elif entry.source.kind == "transformers" and location.is_dir():
        files += location.rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file())


def _step(size: int) -> int:
    step = STEP_BYTES
    while step < size:
        step *= 2
    return step
