"""The sections of a manifest: needs, recipe, drift, gate and freezing; for latency see latency.py.
Imports no torch.

Operators in reports have torch's names: `aten::linear` in TorchScript, `aten.linear.default` in
torch.export. Constants, attribute reads, and building or unpacking of tuples and lists do not count
as operators.

Fields with a default are missing in manifests of earlier releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Literal

from freezer.artifact.latency import MeasuredDrift
from freezer.codec import OMIT_DEFAULT, JsonView, frozen, stored_as
from freezer.hardware import CudaNeeds
from freezer.spec import FLOAT32, text_of

_MAX_LISTED = 100
"""Longest list of names or reasons in a manifest."""


@frozen
class Change:
    """A transformation, and how often freezing applied it."""

    name: str
    count: int
    note: str = ""


@frozen
class KeptTensor:
    """A parameter or buffer that was not made a constant, and why."""

    name: str
    reason: str


@frozen
class PreservedName:
    """An attribute or method that was kept, and why: requested, or changed by `forward` at
    a line.
    """

    name: str
    kind: Literal["attribute", "method"]
    why: str


@frozen
class FreezingReport:
    """What freezing did to one payload's graph.

    Attributes:
        ops_before, ops_after: number of operators by kind, in the captured graph and in the
            payload's.
        changes: what was folded, fused, merged and removed.
        num_constants, constants_bytes: number and captured size of parameters and buffers that
            became constants; tied ones count once.
        constants: their names in the source model, including all names of tied ones.
        folded_bytes: size of new constants computed by folding.
        kept: parameters and buffers that were not made constants.
        unused: parameters and buffers that no call reads; the payload lacks them.
        preserved: attributes and methods that were kept.
        size_before_bytes: of the captured graph's parameters and buffers.
        size_after_bytes: of the payload.
        phases_s: wall time of each phase of the build, in seconds.
        memory_peak_bytes: peak resident memory that the build added; None if the system does not
            report it.
        guards: conditions on inputs that the capture found, in words.
        instructions: number of instructions by family, of families that some CPUs of the
            architecture lack.
        instructions_of: device class that they were checked against; empty without machine code.
        notes: further remarks, one sentence each.
        precisions: of a recipe of lower precision, number of convolutions and matrix products by
            the precision that they run in.
        kept_exact: those that stay in floating point, and why.
    """

    ops_before: Mapping[str, int] = field(default_factory=dict)
    ops_after: Mapping[str, int] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    num_constants: int = 0
    constants_bytes: int = 0
    constants: tuple[str, ...] = ()
    folded_bytes: int = 0
    kept: tuple[KeptTensor, ...] = ()
    unused: tuple[str, ...] = ()
    preserved: tuple[PreservedName, ...] = ()
    size_before_bytes: int = 0
    size_after_bytes: int = 0
    phases_s: Mapping[str, float] = field(default_factory=dict)
    memory_peak_bytes: int | None = None
    guards: tuple[str, ...] = ()
    instructions: Mapping[str, int] = field(default_factory=dict)
    instructions_of: str = ""
    notes: tuple[str, ...] = ()
    precisions: Mapping[str, int] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    kept_exact: tuple[KeptTensor, ...] = field(default=(), metadata=OMIT_DEFAULT)

    def shortened(self, max_listed: int = _MAX_LISTED) -> FreezingReport:
        """The same report; longer lists of names and reasons are cut, and a note counts them."""
        cut = {}
        notes = list(self.notes)
        for name in ("constants", "kept", "unused", "preserved", "guards", "kept_exact"):
            items = getattr(self, name)
            cut[name] = items[:max_listed]
            if len(items) > max_listed:
                notes.append(f"only the first {max_listed} of {len(items)} {name} are listed")
        return replace(self, **cut, notes=tuple(notes))


def stored_as_captured(num_tensors: int) -> str:
    """The note of a payload that is the captured program itself."""
    return (
        "The payload is the captured program: nothing is folded, fused or made a constant, and its "
        f"{num_tensors} parameters and buffers stay what they are."
    )


NOT_TRIED = "not tried"
"""Prefix of the outcome of attempts that do not apply to the kind of model."""


@frozen
class Needs:
    """Requirements on the process that serves.

    Attributes:
        torch: oldest version, major and minor.
        machine: archspec's name of the least CPU; None for `portable`.
        cuda: requirements of an artifact for a GPU.
        packages: oldest version, major and minor, of each engine that the payloads need besides
            torch.
    """

    torch: str
    machine: str | None = None
    cuda: CudaNeeds | None = field(default=None, metadata=OMIT_DEFAULT)
    packages: Mapping[str, str] = field(default_factory=dict, metadata=OMIT_DEFAULT)


@frozen
class RecipeRecord:
    """The recipe that made the artifact.

    Attributes:
        tried: payload, capture, lowering and outcome of each attempt, in order.
        preserve: names of attributes and methods that the frozen model keeps.
        reset: name of the method that resets a stateful model.
        precision: what its kernels compute in.
    """

    name: str
    capture: str
    lowering: str
    settings: JsonView
    tried: tuple[Mapping[str, str], ...] = ()
    preserve: tuple[str, ...] = ()
    reset: str | None = None
    precision: str = field(default=FLOAT32, metadata=OMIT_DEFAULT)


@frozen
class DriftRecord(MeasuredDrift):
    """Judged distance of the outputs from the reference.

    Attributes:
        reference_note: limits of the reference, for people.
        deterministic: whether the eager model gives equal outputs for equal inputs.
        task_metric: the entry's own metric, of eager and of the recipe.
    """

    reference_note: str | None = None
    deterministic: bool = True
    task_metric: Mapping[str, float | None] = field(default_factory=dict)


@frozen
class GateRecord:
    """The limits that the artifact was judged by, and what it is the best in."""

    kind: str = "calibrated"
    error_ratio_max: float
    speedup_min: float
    objective: str = field(default="p50", metadata=OMIT_DEFAULT)


@frozen
class AccuracyRecord:
    """What a lower precision costs, judged on samples that neither calibration nor search saw.

    Attributes:
        precision: of the recipe.
        budget: the limits, by name.
        metric: `MODULE:FUNCTION` of the metric.
        labels: name of the labels in the file of samples.
        measured: value of each measure on the judged samples; of the metric, its drop.
        bounds: what holds with `confidence`, one-sided, for all `num_candidates` together.
        samples: number of samples of each part.
        seed: of the split.
        digest: of the file of samples; empty for generated ones.
    """

    precision: str
    budget: Mapping[str, float]
    metric: str | None = field(default=None, metadata=OMIT_DEFAULT)
    labels: str | None = field(default=None, metadata=OMIT_DEFAULT)
    measured: Mapping[str, float]
    bounds: Mapping[str, float]
    confidence: float
    num_candidates: int
    samples: Mapping[str, int]
    seed: int
    digest: str

    def __str__(self) -> str:
        words = [text_of(name, value, bound=True) for name, value in self.bounds.items()]
        return ", ".join([self.precision, *words])


@frozen
class EntrantRecord:
    """Figures of one judged candidate; `problem` is None where it passed the gate."""

    recipe: str
    problem: str | None
    speedup: float | None
    error_ratio: float | None


@frozen
class CandidateRecord(EntrantRecord):
    """A candidate that did not win. Further fields as in RecipeRecord and FreezingRecord."""

    capture: str
    lowering: str
    tried: tuple[Mapping[str, str], ...] = ()
    build_s: float = 0.0
    size_bytes: int
    strides_equal: bool | None = None
    reports: Mapping[str, FreezingReport] = field(default_factory=dict)


@frozen
class Tradeoff:
    """A candidate on the Pareto front: no other that passed the drift gate is better in one figure
    and as good in the others.

    The latencies are at the deciding thread count and point.

    Attributes:
        p50_ms, p95_ms: None with too few samples; `p95_ms` also unless it is the objective.
        items_per_s: sizes of the dim `batch` (1 without one) per second of calls, by their mean.
        load_ms, memory_mb: see ColdStart; None unless memory is limited.
        size_mb: of the payloads for the deciding thread count.
    """

    recipe: str
    p50_ms: float | None
    p95_ms: float | None = None
    items_per_s: float
    load_ms: float | None = None
    memory_mb: float | None = None
    size_mb: float


@frozen
class Dropped:
    """A payload that was built and dropped."""

    payload: str
    num_threads: int = field(metadata=stored_as("threads"))
    reason: str


@frozen
class PreviousRecord:
    """The artifact that served the class when a new one was judged, compared with the new one.

    Attributes:
        version: that published it first.
        artifact: digest of its image manifest.
        recipe, torch: that made it.
        same_weights: whether it was made of the weights that were judged.
        error_ratio: measured beside the new one, or with other weights as recorded in its manifest.
        speedup, speedup_ci: of the new artifact over it, in the same rounds; None if they were not
            timed.
        p50_ms: its median latency there.
        problem: why they could not be compared; None if they were.
    """

    version: int | None
    artifact: str
    recipe: str
    torch: str
    same_weights: bool
    error_ratio: float | None = None
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None
    p50_ms: float | None = None
    problem: str | None = None

    def __str__(self) -> str:
        return f"version {self.version} ({self.recipe}, torch {self.torch})"


@frozen
class FreezingRecord:
    """What freezing did.

    Attributes:
        build_s: wall time of the build, in seconds.
        size_bytes: of all payloads.
        warnings: of the capture.
        entrants: figures of every candidate.
        pareto: the Pareto front of those that passed the drift gate.
        reports: by payload path.
        dropped: payloads that were built and dropped.
        strides_equal: whether outputs had eager's strides; None: not compared.
        candidates: the candidates that lost.
        failures: by recipe that made no candidate, the error.
        previous: the artifact that this one replaced, if they were compared.
    """

    build_s: float = 0.0
    size_bytes: int = 0
    warnings: tuple[str, ...] = ()
    entrants: tuple[EntrantRecord, ...] = ()
    reports: Mapping[str, FreezingReport] = field(default_factory=dict)
    dropped: tuple[Dropped, ...] = ()
    strides_equal: bool | None = None
    candidates: tuple[CandidateRecord, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    pareto: tuple[Tradeoff, ...] = field(default=(), metadata=OMIT_DEFAULT)
    previous: PreviousRecord | None = field(default=None, metadata=OMIT_DEFAULT)
