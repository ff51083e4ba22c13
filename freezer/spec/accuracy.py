"""Consent to lower precision, and the loss of accuracy that it may cost. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Literal

from freezer.codec import OMIT_DEFAULT, JsonView, frozen
from freezer.errors import SpecError, expected_names

Precision = Literal["bf16", "fp16", "tf32", "int8"]

FLOAT32 = "float32"
"""Precision of every recipe without consent."""

CASTS: tuple[Precision, ...] = ("bf16", "fp16", "tf32")
"""Precisions that round values, and calibrate nothing; the last two are of GPUs."""

PRECISIONS: tuple[Precision, ...] = (*CASTS, "int8")

BAD_ACCURACY = "CP-ACCURACY"
"""Code of all errors about consent and budgets."""

TOP1, METRIC, SQNR, COSINE = "top1_agreement", "metric", "sqnr_db", "cosine"

LIMITS = {TOP1: "top1_agreement_min", METRIC: "metric_drop_max", SQNR: "sqnr_db_min"}
LIMITS[COSINE] = "cosine_min"
"""Name of the limit of each measure."""

_FUNCTION = r"[\w.]+:[\w.]+"

_MOST: Mapping[str, float] = {
    "top1_agreement_min": 1.0,
    "metric_drop_max": 1e9,
    "sqnr_db_min": 150.0,
    "cosine_min": 1.0,
}
"""The measures of a budget, each with what its limit must be below; a limit must be above 0."""


@frozen
class Accuracy:
    """The budget of a lower precision, and the real samples that it is judged on.

    A sample is a row of a set if all inputs share a first dim that may be 1, otherwise a set.

    Attributes:
        samples: file of held-out input sets, or its URL; None for generated ones.
        labels: name of the tensor of each set that is no input, but given to `metric`.
        top1_agreement_min: least share of samples whose greatest output is eager's.
        metric: `MODULE:FUNCTION` of an answer and the labels, or the answer alone; it returns a
            number of which more is better.
        metric_drop_max: most that the mean of the metric may fall below eager's.
        sqnr_db_min: least mean signal-to-noise ratio against eager.
        cosine_min: least mean cosine against eager.
    """

    samples: Path | str | None = None
    labels: str | None = field(default=None, metadata=OMIT_DEFAULT)
    top1_agreement_min: float | None = field(default=None, metadata=OMIT_DEFAULT)
    metric: str | None = field(default=None, metadata=OMIT_DEFAULT)
    metric_drop_max: float | None = field(default=None, metadata=OMIT_DEFAULT)
    sqnr_db_min: float | None = field(default=None, metadata=OMIT_DEFAULT)
    cosine_min: float | None = field(default=None, metadata=OMIT_DEFAULT)

    @property
    def budget(self) -> dict[str, float]:
        """The limits that are set, by name."""
        limits = {name: getattr(self, name) for name in _MOST}
        return {name: limit for name, limit in limits.items() if limit is not None}


def declared_accuracy(given: JsonView) -> Accuracy:
    """Parse a budget from a catalog or the command line.

    Raises:
        SpecError: a field is unknown or has another form; code CP-ACCURACY.
    """
    names = [item.name for item in fields(Accuracy)]
    for name, value in given.items():
        if name not in names:
            raise _refusal(f"field {name!r} is unknown; {expected_names(name, names)}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in _MOST and not (is_number and 0 < value < _MOST[name]):
            raise _refusal(f"{name}: got {value!r}, expected a number above 0 below {_MOST[name]}")
        if name not in _MOST and not isinstance(value, str):
            raise _refusal(f"{name}: got {value!r}, expected a text")
    metric = given.get("metric", "").removeprefix("python:")
    if metric and not re.fullmatch(_FUNCTION, metric):
        raise _refusal(f"metric: got {metric!r}, expected MODULE:FUNCTION")
    return Accuracy(**{**given, "metric": metric or None})


def check_consent(precision: Sequence[str], accuracy: Accuracy | None) -> None:
    """Check that a consent to lower precision has a budget that can be judged.

    Raises:
        SpecError: it has not; code CP-ACCURACY.
    """
    for name in precision:
        if name not in PRECISIONS:
            raise _refusal(f"unknown precision {name!r}; {expected_names(name, PRECISIONS)}")
    if not precision:
        if accuracy is not None:
            raise _refusal("got a budget alone; add `precision: [bf16, int8]`, or leave it out")
        return
    if accuracy is None or not accuracy.budget:
        names = ", ".join(_MOST)
        raise _refusal(f"precision needs a budget: `accuracy:` with one of {names}")
    if (accuracy.metric is None) != (accuracy.metric_drop_max is None):
        raise _refusal("metric and metric_drop_max belong together; give both")
    if accuracy.labels and not accuracy.metric:
        raise _refusal("labels are for a metric; add metric and metric_drop_max")
    is_plain = set(precision) <= set(CASTS) and set(accuracy.budget) == {"sqnr_db_min"}
    if accuracy.samples is None and not is_plain:
        raise _refusal(
            f"without real samples only {', '.join(CASTS)} with sqnr_db_min can be judged, since"
            " generated inputs show neither the values that int8 must represent nor decisions; give"
            " `samples`"
        )


def consents(precision: str, consent: Collection[str]) -> bool:
    """Whether a consent has all precisions of a recipe, such as `int8+bf16`."""
    return precision == FLOAT32 or set(precision.split("+")) <= set(consent)


def _refusal(problem: str) -> SpecError:
    return SpecError(f"accuracy: {problem}", code=BAD_ACCURACY)


def text_of(name: str, value: float, *, bound: bool = False) -> str:
    """A measure in words; a bound is rounded to the safe side."""
    at_least, at_most = (" at least", " at most") if bound else ("", "")
    if name == TOP1:
        return f"agreement{at_least} {_down(100 * value, 1) if bound else 100 * value:.1f}%"
    if name == METRIC:
        return f"metric drop{at_most} {value:.2g}"
    if name == SQNR:
        return f"SQNR{at_least} {_down(value, 1) if bound else value:.1f} dB"
    return f"cosine{at_least} {_down(value, 4) if bound else value:.4f}"


def _down(value: float, digits: int) -> float:
    if not math.isfinite(value):
        return value
    scale = float(10**digits)
    return math.floor(value * scale) / scale
