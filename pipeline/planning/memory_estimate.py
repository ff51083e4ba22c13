"""Demand: the memory that a build or judge asks its node for, told from its entry without loading the model.

Ray places by it and enforces nothing: worker/sandbox.py limits the child. An estimate only has to keep a node from taking ten large
models at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from freezer.freezing.models.sources import FILE_KINDS
from pipeline.catalog.entry import Entry

BASE_BYTES = 1_000_000_000
"""Of a child with torch imported, and its compiler; and all that is known of a model whose weights lie in no file."""

PER_WEIGHT = 4
"""Copies of the weights: a build's peak was measured at up to 3.4 above its baseline; a judge holds the model twice, and once in
float64."""

STEP_BYTES = 1_000_000_000
"""Demands are powers of two of this: Ray keeps one queue for each kind of demand, and should not keep thousands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Memory of one item, in bytes.

    Attributes:
        asked: what Ray is asked for, where a node has as much.
        least: without which there is no hope; a node that has less is no node for it.
        firm: what is asked for was too little before: where no node has as much, only the largest will do.
    """

    asked: int
    least: int
    firm: bool = False


def demand_of(entry: Entry) -> Demand:
    """What an entry asks for, whose files are where it says."""
    if entry.limits.memory_gb is not None:
        given = int(entry.limits.memory_gb * 1e9)
        return Demand(asked=given, least=given)
    weights = _weights_bytes(entry)
    return Demand(asked=_step(BASE_BYTES + PER_WEIGHT * weights), least=weights)


def corrected(demand: Demand, size: int) -> Demand:
    """A demand by experience: `size` bytes at least."""
    return replace(demand, asked=max(size, demand.asked), firm=True)


def learned(demand: Demand, used_bytes: int) -> Demand:
    """A demand where a task of the same model was seen to use some memory."""
    return demand if used_bytes <= demand.asked else replace(demand, asked=_step(used_bytes))


def _weights_bytes(entry: Entry) -> int:
    """The size of the files that a model is made of; 0 where it is not known before it is fetched or made."""
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
