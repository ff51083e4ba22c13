"""Held-out samples, split by a fixed seed into disjoint parts: to calibrate a lower precision, to
search one, and to judge it by its budget.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from torch import Tensor

from freezer.compare import Values
from freezer.compare.tensor_values import comparable, values_of
from freezer.errors import JudgeError, SpecError
from freezer.files import digest_bytes, digest_file
from freezer.runtime.accuracy import Judged, has_classes, judge_accuracy, measures, scale_of
from freezer.runtime.input_sets import InputSet, generate_at
from freezer.runtime.tensor_files import read_samples, tensor_bytes
from freezer.runtime.tensors import dtype_name, leaves_of
from freezer.spec import (
    BAD_ACCURACY,
    LIMITS,
    METRIC,
    TOP1,
    Accuracy,
    InputSpec,
    match_headers,
    of_inputs,
)

SEED = 0
"""Of the order of the samples before they are split."""

PARTS = 8
"""One of so many samples is for calibration, and one for search; the others are judged."""

MOST = 128
"""Most samples for calibration, and for search."""

NUM_GENERATED = 32
"""Generated samples, where there are no real ones."""


Metric = Callable[..., Any]
"""Quality of one answer, given it and its labels: a number of which more is better."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The parts of a file of samples; `labels` are those of the judged ones.

    Attributes:
        digest: digest of the file; empty for generated samples.
    """

    accuracy: Accuracy
    calibration: tuple[InputSet, ...]
    search: tuple[InputSet, ...]
    judged: tuple[InputSet, ...]
    labels: tuple[Tensor | None, ...]
    digest: str

    @property
    def counts(self) -> dict[str, int]:
        """Number of samples of each part."""
        parts = {"calibration": self.calibration, "search": self.search, "judged": self.judged}
        return {name: len(part) for name, part in parts.items()}


def read_held_out(accuracy: Accuracy, spec: InputSpec) -> HeldOut:
    """Read and split the samples of a budget; repetitions of a sample count once.

    Raises:
        SpecError: the file does not fit the spec (code CP-SAMPLES), lacks the labels, or has too
            few samples (code CP-ACCURACY).
    """
    if accuracy.samples is None:
        point = spec.first_point()
        made = [generate_at(spec, point, seed=2000 + index) for index in range(NUM_GENERATED)]
        return _split(accuracy, [(each, None) for each in made], "", num_apart=0)
    path = Path(accuracy.samples)
    pairs: dict[str, tuple[InputSet, Tensor | None]] = {}
    for inputs, labels in _labelled(read_samples(path), accuracy, spec):
        for item, label in _rows(inputs, labels, spec):
            pairs.setdefault(digest_bytes(tensor_bytes(item.tensors)), (item, label))
    if len(pairs) < PARTS:
        raise SpecError(
            f"accuracy: {path} has {len(pairs)} different samples, expected at least {PARTS}, and"
            " for decisions some hundreds",
            code=BAD_ACCURACY,
        )
    ordered = list(pairs.values())
    random.Random(SEED).shuffle(ordered)
    num_apart = min(MOST, len(ordered) // PARTS)
    return _split(accuracy, ordered, digest_file(path), num_apart=num_apart)


def _split(
    accuracy: Accuracy,
    pairs: Sequence[tuple[InputSet, Tensor | None]],
    digest: str,
    *,
    num_apart: int,
) -> HeldOut:
    sets = [inputs for inputs, _ in pairs]
    return HeldOut(
        accuracy=accuracy,
        calibration=tuple(sets[:num_apart]),
        search=tuple(sets[num_apart : 2 * num_apart]),
        judged=tuple(sets[2 * num_apart :]),
        labels=tuple(label for _, label in pairs[2 * num_apart :]),
        digest=digest,
    )


def _labelled(
    sets: Sequence[dict[str, Tensor]], accuracy: Accuracy, spec: InputSpec
) -> Iterator[tuple[InputSet, Tensor | None]]:
    labels = [tensors.pop(accuracy.labels or "", None) for tensors in sets]
    if accuracy.labels and any(label is None for label in labels):
        raise SpecError(
            f"accuracy: a set of {accuracy.samples} lacks the labels {accuracy.labels!r}; store"
            " them beside its inputs",
            code=BAD_ACCURACY,
        )
    sets = [of_inputs(tensors, spec) for tensors in sets]
    headers = [_headers(tensors) for tensors in sets]
    for point, tensors, label in zip(match_headers(headers, spec), sets, labels, strict=True):
        ordered = {item.name: tensors[item.name].contiguous() for item in spec.tensors}
        yield InputSet(point=point, tensors=ordered), label


def _headers(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (dtype_name(part.dtype), tuple(part.shape)) for name, part in tensors.items()}


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
    metric: Metric | None,
    eager: Iterable[Any],
    answers: Iterable[Any],
    num_candidates: int,
) -> Judged:
    """Judge a model's answers by the budget.

    Args:
        held_out: the labels and the budget.
        metric: the function that the budget names; None to judge by the other limits.
        eager: eager's answers, in the order of the judged samples, or without a metric of others.
        answers: the model's answers.
        num_candidates: candidates that are judged on the same samples.

    Raises:
        JudgeError: an answer has no decisions, or no quality; code CP-ACCURACY.
    """
    budget = held_out.accuracy.budget
    names = [name for name, limit in LIMITS.items() if limit in budget]
    if metric is None:
        names = [name for name in names if name != METRIC]
    samples: dict[str, list[float]] = {name: [] for name in names}
    qualities = []
    all_labels = held_out.labels if metric else repeat(None)
    for before, after, labels in zip(eager, answers, all_labels, strict=False):
        pair = _outputs(before), _outputs(after)
        if TOP1 in names and not any(map(has_classes, pair[0])):
            raise JudgeError(
                "accuracy: top1_agreement_min needs an output with several classes along its last"
                " dim; use a metric",
                code=BAD_ACCURACY,
            )
        for name, value in measures(*pair, names).items():
            samples[name].append(value)
        if metric is not None:
            given = [] if labels is None else [labels]
            qualities.append(_quality(metric, before, *given))
            samples[METRIC].append(qualities[-1] - _quality(metric, after, *given))
    return judge_accuracy(samples, budget, num_candidates, scale_of(qualities))


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
