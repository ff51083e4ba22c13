"""Migration: compare a TorchScript model that was converted to torch.export with the frozen
TorchScript.

If PyTorch's converter turns the file into an exported program, it competes as `inductor-frozen`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from torch import Tensor

from freezer.artifact import Migration
from freezer.compare.gate import Sums
from freezer.compare.numerics import distances
from freezer.freezing.judging.trials import Trial
from freezer.spec import SamplingPolicy
from freezer.timing import Sampling, speedup

CONVERTED = "convert"
"""The capture that converts TorchScript to an exported program."""


def compare(
    trials: Sequence[Trial],
    outputs: Mapping[str, Sequence[Sequence[Tensor]]],
    sampling: Sampling | None,
    policy: SamplingPolicy,
) -> Migration | None:
    """Compare the converted candidate with the fastest frozen TorchScript; None if no candidate was
    converted.

    Args:
        trials: of all candidates.
        outputs: output tensors of each call of the judge, by recipe; empty for a candidate that
            fails to run.
        sampling: latency samples of the judge; None if nothing was timed.
        policy: the sampling policy.
    """
    ran = [trial for trial in trials if outputs[trial.candidate.recipe]]
    converted = next((trial for trial in ran if trial.candidate.capture == CONVERTED), None)
    if converted is None:
        return None
    recipe = converted.candidate.recipe
    if converted.problem is not None:
        return Migration(
            possible=False, reason=f"{recipe} does not pass the drift gate", recipe=recipe
        )
    torchscript = [trial for trial in ran if trial.candidate.lowering == "torchscript"]
    if not torchscript:
        return Migration(possible=True, recipe=recipe)
    passing = [trial for trial in torchscript if trial.problem is None]
    faster = None
    if passing and sampling is not None:
        against = min(
            (trial.candidate.recipe for trial in passing),
            key=lambda name: statistics.median_high(sampling.pooled(name)),
        )
        if sampling.stable:
            faster = speedup(sampling, recipe, eager=against, num_candidates=1, policy=policy)
    else:
        against = torchscript[0].candidate.recipe
    worst, relative = _apart(outputs[recipe], outputs[against])
    return Migration(
        possible=True,
        recipe=recipe,
        against=against,
        gain=faster.value if faster else None,
        gain_ci=(faster.low, faster.high) if faster else None,
        max_abs_diff=worst,
        relative_rms_diff=relative,
    )


def refused(failures: Mapping[str, str]) -> Migration | None:
    """The migration of a model whose conversion failed; None if no recipe tried to convert it.

    Args:
        failures: the error message of each recipe that made no candidate. A recipe that converts
            tries nothing else on TorchScript.
    """
    start = f"{CONVERTED}: "
    reasons = [why.removeprefix(start) for why in failures.values() if why.startswith(start)]
    return Migration(possible=False, reason=reasons[0]) if reasons else None


def _apart(
    one: Sequence[Sequence[Tensor]], other: Sequence[Sequence[Tensor]]
) -> tuple[float | None, float | None]:
    """The largest difference, and rms of the difference over rms of `other`, over elements that are
    finite in both.
    """
    sums = Sums()
    for mine, theirs in zip(one, other, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            if a.shape != b.shape:
                return None, None
            sums.include(distances(b, a)[0])
    return sums.max_abs_err, math.sqrt(sums.noise / sums.signal) if sums.signal > 0 else (
        0.0 if sums.noise == 0 else None
    )
