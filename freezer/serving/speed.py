"""Compare the speed of an artifact here with the portable artifact's, and the ratio with both
manifests.

An artifact can be correct and many times too slow: its packed weights fit one instruction set and
one thread count; elsewhere oneDNN converts them in every call or runs reference kernels. The judge
timed both artifacts against eager. The ratio of these speedups is the expectation here, where no
eager model is available.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from freezer.artifact import Artifact, LatencyRecord, Manifest
from freezer.errors import SpeedError, UsageError
from freezer.hardware import PORTABLE, device_class
from freezer.runtime.contract import OpenModel
from freezer.runtime.devices import CPU
from freezer.runtime.input_sets import InputSet, distinct_at, on_device
from freezer.runtime.tensors import to_tensor
from freezer.runtime.torch_settings import threads
from freezer.serving.canary import golden_inputs
from freezer.serving.opening import open_artifact
from freezer.serving.process import LoadOptions
from freezer.spec import SamplingPolicy, bind
from freezer.timing import Sampling, meter_of, sample, speedup

_LEAST_SHARE = 0.5
"""Share of the expected ratio below which the check fails; machines of one class differ by less."""

_POLICY = SamplingPolicy(percentiles=("p50",))


@dataclass(frozen=True, kw_only=True)
class SpeedCheck:
    """Measured speed, relative to the portable artifact.

    Attributes:
        device_class: of the artifact.
        expected: ratio in the manifests.
        measured, low, high: ratio here, with its 95% confidence interval.
        num_threads: of both artifacts.
        median_ms: by device class.
    """

    device_class: str
    expected: float
    measured: float
    low: float
    high: float
    num_threads: int
    median_ms: Mapping[str, float]

    def __str__(self) -> str:
        medians = ", ".join(f"{name} {median:.3g} ms" for name, median in self.median_ms.items())
        interval = f"{self.low:.2f} to {self.high:.2f}"
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return (
            f"{self.measured:.2f} times as fast as portable here ({interval}; {medians};"
            f" {threads}); by the manifests {self.expected:.2f} times"
        )


def check_speed(
    artifact: Artifact,
    portable: Artifact,
    num_threads: int,
    policy: SamplingPolicy = _POLICY,
    device: torch.device = CPU,
) -> SpeedCheck:
    """Time a verified artifact against the portable one, in this process, as it would serve; both
    with the thread count of the payload that serves.

    Raises:
        SpeedError: the ratio is below half of the expected one, or the machine is too busy.
        UsageError: the manifests have no speedup to compare with.
    """
    manifest, name = artifact.manifest, artifact.manifest.device_class
    point = _judged(manifest).point
    options = LoadOptions(canary=False, device=str(device), arrays="torch")
    base = open_artifact(portable, num_threads, options)
    model = open_artifact(artifact, num_threads, options)
    num_threads = model.payload_for(point).num_threads or num_threads
    expected = expected_ratio(manifest, portable.manifest, num_threads)
    models = {PORTABLE: base, name: model}
    with threads(num_threads):
        sampling = _sample(manifest, models, _inputs(artifact, point, device), policy)
    ratio = speedup(sampling, name, eager=PORTABLE, num_candidates=1, policy=policy)
    check = SpeedCheck(
        device_class=name,
        expected=expected,
        measured=ratio.value,
        low=ratio.low,
        high=ratio.high,
        num_threads=num_threads,
        median_ms={timed: statistics.median(sampling.pooled(timed)) for timed in models},
    )
    if check.measured < _LEAST_SHARE * check.expected:
        raise SpeedError(
            f"{manifest.model} for {name}: {check}. Its results are correct, at less than half of"
            " its speed: compare CPU, torch and environment with `provenance.host` of its manifest"
        )
    return check


def _sample(
    manifest: Manifest,
    models: Mapping[str, OpenModel],
    inputs: Sequence[InputSet],
    policy: SamplingPolicy,
) -> Sampling:
    """Time both models side by side.

    Raises:
        SpeedError: the machine is too busy.
    """
    reset = manifest.recipe.reset
    calls = {name: _calls(model, inputs) for name, model in models.items()}
    resets = {name: model.preserved[reset] for name, model in models.items() if reset}
    with meter_of(models[PORTABLE].device, policy) as meter:
        sampling = sample(calls, policy, resets, meter)
    if not sampling.stable:
        raise SpeedError(
            f"{manifest.model} for {manifest.device_class}: {sampling.problem}, expected at least"
            f" {policy.min_rounds} rounds; stop other processes on these CPUs, and try again"
        )
    return sampling


def _calls(
    model: OpenModel,
    inputs: Sequence[InputSet],
) -> list[Callable[[], object]]:
    calls: list[Callable[[], object]] = []
    for given in inputs:
        args, kwargs = bind(model.inputs, given.cloned())
        calls.append(partial(model, *args, **kwargs))
    return calls


def expected_ratio(manifest: Manifest, portable: Manifest, num_threads: int) -> float:
    """Speed of a class's artifact relative to the portable artifact by their manifests, for a
    thread count that was judged.

    On a GPU the portable program was never judged, and counts as fast as eager.

    Raises:
        UsageError: a manifest has no speedup over eager.
    """
    ratios = []
    for each in (manifest, portable):
        ratio = _judged(each).speedup_with(num_threads)
        if ratio is None:
            raise _no_speedup(each)
        if device_class(manifest.device_class).kind == "cuda":
            return ratio
        ratios.append(ratio)
    return ratios[0] / ratios[1]


def _judged(manifest: Manifest) -> LatencyRecord:
    if manifest.latency is None:
        raise _no_speedup(manifest)
    return manifest.latency


def _no_speedup(manifest: Manifest) -> UsageError:
    return UsageError(
        f"{manifest.model} for {manifest.device_class}: the manifest has no speedup over eager to"
        " compare with; judge it again on an undisturbed machine"
    )


def _inputs(
    artifact: Artifact,
    point: Mapping[str, int],
    device: torch.device,
) -> list[InputSet]:
    """Distinct inputs at the judged point: golden inputs, cut or repeated to size, then generated
    ones.
    """
    manifest = artifact.manifest
    golden = golden_inputs(artifact)
    sets = []
    for golden_set, arrays in zip(manifest.golden, golden, strict=True):
        tensors = {name: to_tensor(array) for name, array in arrays.items()}
        sets.append(InputSet(point=golden_set.point, tensors=tensors))
    return [on_device(item, device) for item in distinct_at(manifest.inputs, sets, point)]
