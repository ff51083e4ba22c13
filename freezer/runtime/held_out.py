"""Held-out samples, split by a fixed seed into disjoint parts: to calibrate a lower precision, to
search one, and to judge it by its budget.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from torch import Tensor

from freezer.compare import Values
from freezer.errors import JudgeError, SpecError
from freezer.files import digest_bytes, digest_file
from freezer.runtime.accuracy import Judged, has_classes, judge_accuracy, measures, scale_of
from freezer.runtime.input_sets import InputSet, generate_at, match_samples
from freezer.runtime.tensor_files import read_samples, tensor_bytes
from freezer.runtime.tensors import comparable, leaves_of, values_of
from freezer.spec import (
    BAD_ACCURACY,
    LIMITS,
    METRIC,
    TOP1,
    Accuracy,
    InputSpec,
    of_inputs,
)

SEED = 0
"""Of the order of the samples before they are split."""

PARTS = 8
"""One of so many samples is for calibration, and one for search; the others are judged."""

MOST = 256
"""Most samples for calibration, and for search."""

NUM_GENERATED = 32
"""Generated samples, where there are no real ones."""


Metric = Callable[..., Any]
"""Quality of one answer, given it and its labels: a number of which more is better."""


Samples = tuple[tuple[InputSet, Tensor | None], ...]
"""Inputs, and their label or None."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
    """Samples with their labels, and how they are split.

    Attributes:
        samples: in the order of the split; a label is None without labels.
        num_apart: how many are for calibration, and as many for search.
        digest: of the file; empty for generated samples.
        metric: the function that the budget names.
    """

    accuracy: Accuracy
    samples: Samples
    num_apart: int
    digest: str
    metric: Metric | None = None

    @property
    def calibration(self) -> list[InputSet]:
        """The samples to calibrate with."""
        return [inputs for inputs, _ in self.samples[: self.num_apart]]

    @property
    def search(self) -> Samples:
        """The samples to search with."""
        return self.samples[self.num_apart : 2 * self.num_apart]

    @property
    def judged(self) -> Samples:
        """The samples to judge on."""
        return self.samples[2 * self.num_apart :]

    @property
    def counts(self) -> dict[str, int]:
        """Number of samples of each part."""
        apart = self.num_apart
        return {"calibration": apart, "search": apart, "judged": len(self.judged)}


def read_held_out(
    accuracy: Accuracy,
    spec: InputSpec,
    find: Callable[[str], Metric] = resolve_name,
    num_apart: int = 0,
) -> HeldOut:
    """Read and split the samples of a budget; repetitions of a sample count once.

    Args:
        find: imports the metric that `module:function` names.
        num_apart: how an artifact's samples were split.

    Raises:
        SpecError: the file does not fit (CP-SAMPLES), lacks labels or is too short (CP-ACCURACY).
    """
    if accuracy.samples is None:
        return HeldOut(accuracy=accuracy, samples=_generated(spec), num_apart=0, digest="")
    path = Path(accuracy.samples)
    sets = read_samples(path)
    labels = [tensors.get(accuracy.labels or "") for tensors in sets]
    pairs: dict[str, tuple[InputSet, Tensor | None]] = {}
    matched = match_samples([of_inputs(tensors, spec) for tensors in sets], spec)
    for inputs, label in zip(matched, labels, strict=True):
        for row in _rows(inputs, label, spec):
            pairs.setdefault(digest_bytes(tensor_bytes(row[0].tensors)), row)
    unlabelled = accuracy.labels is not None and any(label is None for label in labels)
    if unlabelled or len(pairs) < PARTS:
        problem = f"a set lacks the labels {accuracy.labels!r}"
        if not unlabelled:
            problem = f"{len(pairs)} different samples, expected at least {PARTS}, better hundreds"
        raise SpecError(f"accuracy: {path}: {problem}", code=BAD_ACCURACY)
    ordered = list(pairs.values())
    random.Random(SEED).shuffle(ordered)
    return HeldOut(
        accuracy=accuracy,
        samples=tuple(ordered),
        num_apart=num_apart or min(MOST, len(ordered) // PARTS),
        digest=digest_file(path),
        metric=find(accuracy.metric) if accuracy.metric else None,
    )


def _generated(spec: InputSpec) -> Samples:
    point, seeds = spec.first_point(), range(2000, 2000 + NUM_GENERATED)
    return tuple((generate_at(spec, point, seed=seed), None) for seed in seeds)


def _rows(
    inputs: InputSet, labels: Tensor | None, spec: InputSpec
) -> Iterator[tuple[InputSet, Tensor | None]]:
    """The samples of a set: its rows, if all inputs share a first dim that may be 1, or itself."""
    firsts = {item.shape[0] if item.shape else None for item in spec.tensors}
    single = [dim.name for dim in spec.dims if {dim.name} == firsts and dim.min == 1]
    if not single:
        yield inputs, labels
        return
    point = {**inputs.point, single[0]: 1}
    for row in range(inputs.point[single[0]]):
        own = {name: tensor[row : row + 1] for name, tensor in inputs.tensors.items()}
        yield InputSet(point=point, tensors=own), None if labels is None else labels[row : row + 1]


def judge_answers(
    held_out: HeldOut,
    samples: Samples,
    eager: Iterable[Any],
    answers: Iterable[Any],
    num_candidates: int,
) -> Judged:
    """Judge a model's answers by the budget.

    Args:
        samples: those that were answered.
        eager: eager's answers, in the order of the samples.
        answers: the model's answers.
        num_candidates: candidates that are judged on the same samples.

    Raises:
        JudgeError: an answer has no decisions, or no quality; code CP-ACCURACY.
    """
    budget = held_out.accuracy.budget
    names = [name for name, limit in LIMITS.items() if limit in budget]
    values: dict[str, list[float]] = {name: [] for name in names}
    qualities = []
    for (_, label), before, after in zip(samples, eager, answers, strict=False):
        pair = _outputs(before), _outputs(after)
        if TOP1 in names and not any(map(has_classes, pair[0])):
            raise JudgeError(
                "accuracy: top1_agreement_min needs an output with several classes along its last"
                " dim; use a metric",
                code=BAD_ACCURACY,
            )
        for name, value in measures(*pair, names).items():
            values[name].append(value)
        if held_out.metric is not None:
            given = [] if label is None else [label]
            qualities.append(_quality(held_out.metric, before, *given))
            values[METRIC].append(qualities[-1] - _quality(held_out.metric, after, *given))
    return judge_accuracy(values, budget, num_candidates, scale_of(qualities))


def _quality(metric: Metric, *given: Any) -> float:
    try:
        return float(metric(*given))
    except Exception as error:  # the user's code
        raise JudgeError(
            f"accuracy: the metric raises {type(error).__name__}: {error}; it takes an answer of"
            " the model and the labels of one sample, and returns a number",
            code=BAD_ACCURACY,
        ) from error


def _outputs(answer: Any) -> list[Values]:
    return [values_of(leaf.detach().cpu()) for leaf in leaves_of(answer) if comparable(leaf)]
