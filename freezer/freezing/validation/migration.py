"""Migration: compare a TorchScript model that was converted to torch.export with the frozen TorchScript.

If PyTorch's converter turns the file into an exported program, it competes as `inductor-frozen`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from freezer.artifact.sections import Migration
from freezer.freezing.recipes.recipes import CaptureName
from freezer.limits import SamplingPolicy
from freezer.numerics import finite_difference, square_sum
from freezer.timing.sampling import Sampling, speedup

CONVERTED = "convert"
"""The capture that converts TorchScript to an exported program."""

_CAPTURE = re.compile(rf"(?:^|; )({'|'.join(map(re.escape, get_args(CaptureName)))}): ")
"""The name of a capture within the message of a failed build."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrant:
    """A candidate to compare.

    Attributes:
        passed: whether it passed the drift gate, and was timed.
        answers: output tensors of each call, in the order of the judge's calls.
    """

    recipe: str
    capture: str
    lowering: str
    passed: bool
    answers: Sequence[Sequence[Tensor]]


def compare(entrants: Sequence[Entrant], sampling: Sampling | None, policy: SamplingPolicy) -> Migration | None:
    """Compare the converted candidate with the fastest frozen TorchScript; None if no candidate was converted.

    Args:
        entrants: all candidates that the judge ran.
        sampling: latency samples of the judge; None if nothing was timed.
        policy: the sampling policy.
    """
    converted = next((e for e in entrants if e.capture == CONVERTED), None)
    if converted is None:
        return None
    torchscript = [e for e in entrants if e.lowering == "torchscript"]
    legacy = [e for e in torchscript if e.passed] or torchscript
    if not converted.passed:
        return Migration(possible=False, reason=f"{converted.recipe} does not pass the drift gate", recipe=converted.recipe)
    if not legacy:
        return Migration(possible=True, recipe=converted.recipe)
    fastest = min(legacy, key=lambda e: _median(sampling, e.recipe))
    faster = None
    if sampling is not None and sampling.stable and fastest.passed:
        faster = speedup(sampling, converted.recipe, eager=fastest.recipe, num_candidates=1, policy=policy)
    worst, relative = _apart(converted.answers, fastest.answers)
    return Migration(
        possible=True,
        recipe=converted.recipe,
        against=fastest.recipe,
        gain=faster.value if faster else None,
        gain_ci=(faster.low, faster.high) if faster else None,
        max_abs_diff=worst,
        relative_rms_diff=relative,
    )


def refused(failures: Mapping[str, str]) -> Migration | None:
    """The migration of a model whose conversion failed; None if no recipe tried to convert it.

    Args:
        failures: the error message of each recipe that made no candidate: `CAPTURE: reason` of each capture, joined with '; '.
    """
    for why in failures.values():
        # A reason may contain '; ' too: it ends at the name of the next capture.
        parts = _CAPTURE.split(why)
        found = dict(zip(parts[1::2], parts[2::2], strict=True))
        if CONVERTED in found:
            return Migration(possible=False, reason=found[CONVERTED])
    return None


def _median(sampling: Sampling | None, recipe: str) -> float:
    samples = sorted(sampling.pooled(recipe)) if sampling and recipe in sampling.samples_ms else []
    return samples[len(samples) // 2] if samples else math.inf


def _apart(one: Sequence[Sequence[Tensor]], other: Sequence[Sequence[Tensor]]) -> tuple[float | None, float | None]:
    """The largest difference, and rms of the difference over rms of `other`, over elements that are finite in both."""
    worst, noise, signal = 0.0, 0.0, 0.0
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            if a.shape != b.shape:
                return None, None
            difference, reference = finite_difference(a, b)
            worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
            noise += square_sum(difference)
            signal += square_sum(reference)
    return worst, math.sqrt(noise / signal) if signal > 0 else (0.0 if noise == 0 else None)
