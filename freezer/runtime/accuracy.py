"""Accuracy of a lower precision: measures of each sample, one-sided bounds over samples, and the
decision by a budget. Imports no torch.

docs/reference/measuring.md defines the measures and the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from freezer.codec import frozen
from freezer.compare import Sums, Values, distances, structure_problem
from freezer.spec import COSINE, LIMITS, METRIC, SQNR, TOP1, text_of

CONFIDENCE = 0.95
"""One-sided confidence of all candidates together."""

MOST_DB = 150.0
"""SQNR of equal outputs, which float32 hardly exceeds."""

LEAST_SAMPLES = 8
"""Samples that a bound on a mean needs: fewer do not show how values are spread."""

NUM_RESAMPLES = 4000

MOST_NEEDED = 10**6
"""Samples above which a number that is needed is not searched."""

_Numbers = NDArray[np.float64]


@frozen
class Judged:
    """A candidate's accuracy on the judged samples.

    Attributes:
        measured: value of each measure; of the metric, how far it dropped.
        bounds: the value that holds with CONFIDENCE: at least that, or of a drop at most.
        problem: why it does not keep the budget; None if it does.
    """

    measured: Mapping[str, float]
    bounds: Mapping[str, float]
    problem: str | None


def measures(
    eager: Sequence[Values], answer: Sequence[Values], names: Sequence[str]
) -> dict[str, float]:
    """Measures of one sample, by name, each of the worst output; agreement is of the first output
    with classes.

    Args:
        eager, answer: floating-point outputs of eager and of the candidate.
        names: the measures to take; the metric is not one of them.
    """
    pairs = list(zip(eager, answer, strict=True))
    same = [structure_problem(r, c) is None for r, c in pairs]
    sums = [distances(r, c)[0] for r, c in pairs] if all(same) else []
    found: dict[str, float] = {}
    if TOP1 in names:
        index = next(i for i, r in enumerate(eager) if has_classes(r))
        decisions = [np.argmax(values.array, axis=-1) for values in pairs[index] if same[index]]
        found[TOP1] = float(same[index] and np.array_equal(*decisions))
    if SQNR in names:
        found[SQNR] = min([_or_equal(each.sqnr_db, MOST_DB, each) for each in sums], default=0.0)
    if COSINE in names:
        found[COSINE] = min([_or_equal(each.cosine, 1.0, each) for each in sums], default=0.0)
    return found


def _or_equal(value: float | None, most: float, sums: Sums) -> float:
    """A measure, which is undefined where outputs are equal or zero."""
    return most * (sums.noise == 0) if value is None else min(value, most)


def has_classes(values: Values) -> bool:
    """Whether the greatest value along the last dim of an output is a decision."""
    return bool(values.shape) and values.shape[-1] > 1


def judge_accuracy(
    samples: Mapping[str, Sequence[float]],
    budget: Mapping[str, float],
    num_candidates: int,
    scale: float = 1.0,
) -> Judged:
    """Judge a candidate by its budget.

    Args:
        samples: for each measure, the value of every judged sample; for the metric its drop.
        budget: limits, by name.
        num_candidates: candidates that are judged on the same samples.
        scale: how far the metric of a sample may fall.
    """
    alpha = (1 - CONFIDENCE) / max(num_candidates, 1)
    measured: dict[str, float] = {}
    bounds: dict[str, float] = {}
    problems = []
    for name, given in samples.items():
        values = np.asarray(given, np.float64)
        measured[name] = float(values.mean())
        bounds[name] = _bound(name, values, alpha, scale)
        limit = budget[LIMITS[name]]
        if _keeps(name, bounds[name], limit):
            continue
        text = f"{text_of(name, measured[name])} of {len(values)} samples"
        if _keeps(name, measured[name], limit):
            text += "; too few samples to be sure"
            if name == TOP1:
                text += f": {samples_needed(1 - measured[name], limit, alpha)} are needed"
        problems.append(f"{text}; {LIMITS[name]} is {limit:g}")
    return Judged(measured=measured, bounds=bounds, problem="; ".join(problems) or None)


def scale_of(qualities: Sequence[float]) -> float:
    """How far the metric of a sample may fall, by eager's: from the best to the worst one."""
    if not qualities:
        return 1.0
    return max(qualities) - min(qualities) or max(map(abs, qualities)) or 1.0


def _keeps(name: str, value: float, limit: float) -> bool:
    return value <= limit if name == METRIC else value >= limit


def _bound(name: str, values: _Numbers, alpha: float, scale: float) -> float:
    if name == TOP1:
        return least_share(int((values < 1).sum()), len(values), alpha)
    if name == METRIC:
        return most_drop(values, alpha, scale)
    return least_mean(values, alpha)


def least_share(num_differ: int, num: int, alpha: float) -> float:
    """Clopper and Pearson's lower bound of a share, of which `num_differ` of `num` samples are not
    part.
    """
    if num_differ >= num:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _at_most(num_differ, num, 1 - middle) <= alpha:
            low = middle
        else:
            high = middle
    return low


def _at_most(count: int, num: int, share: float) -> float:
    """The probability of at most so many of a share."""
    total = 0.0
    for i in range(count + 1):
        log = math.lgamma(num + 1) - math.lgamma(i + 1) - math.lgamma(num - i + 1)
        total += math.exp(log + i * math.log(share) + (num - i) * math.log1p(-share))
    return min(total, 1.0)


def samples_needed(differing: float, limit: float, alpha: float) -> int:
    """The samples at which a share of differing ones is decided to be at most 1 - limit."""
    num = math.ceil(math.log(alpha) / math.log(limit))  # if none differs
    while num < MOST_NEEDED and least_share(math.ceil(differing * num), num, alpha) < limit:
        num += 1 + num // 100
    return num


def least_mean(values: _Numbers, alpha: float) -> float:
    """Student's lower bound of a mean; minus infinity for too few samples."""
    num = len(values)
    if num < LEAST_SAMPLES:
        return -math.inf
    z, df = NormalDist().inv_cdf(1 - alpha), num - 1
    # Cornish and Fisher's expansion of Student's quantile, to 1% from 7 degrees of freedom on.
    t = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    return float(values.mean() - t * values.std(ddof=1) / math.sqrt(num))


def most_drop(drops: _Numbers, alpha: float, scale: float) -> float:
    """Upper bound of a mean drop, by a paired bootstrap; at least that of as many samples without
    any drop, since a bootstrap of equal samples knows of no others.
    """
    num = len(drops)
    random = np.random.default_rng(0)
    means = [drops[random.integers(0, num, num)].mean() for _ in range(NUM_RESAMPLES)]
    unseen = scale * (1 - least_share(0, num, alpha))
    return max(float(np.quantile(means, 1 - alpha)), unseen)
