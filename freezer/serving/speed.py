"""Compare the speed of an artifact here with the portable artifact's, and the ratio with both
manifests.

An artifact can be correct and many times too slow: its packed weights fit one instruction set and
one thread count; elsewhere oneDNN converts them in every call or runs reference kernels. The judge
timed both artifacts against eager. The ratio of these speedups is the expectation here, where no
eager model is available.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from freezer.artifact import GOLDEN_INPUTS, Artifact, LatencyRecord, Manifest
from freezer.errors import SpeedCheck, SpeedError, UsageError
from freezer.files import scratch_folder
from freezer.hardware import PORTABLE, device_class
from freezer.runtime.devices import CPU, host_fingerprint
from freezer.runtime.frozen_model import FrozenModel
from freezer.runtime.input_sets import InputSet, distinct_at, on_device
from freezer.runtime.tensor_files import golden_inputs, load_tensors
from freezer.runtime.torch_settings import threads
from freezer.serving.opening import open_artifact
from freezer.serving.process import LoadOptions
from freezer.spec import SamplingPolicy, bind
from freezer.store import Store, Version
from freezer.timing import Sampling, meter_of, sample, speedup

_LEAST_SHARE = 0.5
"""Share of the expected ratio below which the check fails; machines of one class differ by less."""

_POLICY = SamplingPolicy(percentiles=("p50",))

HOW = (
    "use --store URI for its store, or --portable DIR for its folder (`coldpress pull"
    " --device-class portable`)"
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
    manifest = artifact.manifest
    name = manifest.device_class
    point = dict(_judged(manifest).point)
    options = LoadOptions(canary=False, device=str(device))
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
        point=point,
        median_ms={timed: statistics.median(sampling.pooled(timed)) for timed in models},
        num_rounds=sampling.num_undisturbed,
        num_dropped=sampling.num_dropped,
    )
    _check_ratio(manifest, check)
    return check


def _sample(
    manifest: Manifest,
    models: Mapping[str, FrozenModel],
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


def _check_ratio(manifest: Manifest, check: SpeedCheck) -> None:
    """Raise for an artifact that is less than half as fast as expected."""
    if check.measured >= _LEAST_SHARE * check.expected:
        return
    raise SpeedError(
        f"{manifest.model} for {check.device_class}: {check}; by the manifests it is"
        f" {check.expected:.2f} times. Its results are correct, at less than half of its speed."
        f" Differences here: {'; '.join(differences(manifest)) or 'none found'}",
        check=check,
    )


def _calls(
    model: FrozenModel,
    inputs: Sequence[InputSet],
) -> list[Callable[[], object]]:
    calls: list[Callable[[], object]] = []
    for given in inputs:
        args, kwargs = bind(model.inputs, given.cloned())
        calls.append(partial(model, *args, **kwargs))
    return calls


def differences(manifest: Manifest) -> Iterator[str]:
    """Differences of the environment, torch and the CPU from the judge's, which may explain a slow
    artifact.
    """
    judged = manifest.provenance.get("host") or {}
    there = {
        **(judged.get("environment") or {}),
        "torch": manifest.toolchain.get("torch"),
        "CPU": judged.get("cpu"),
    }
    host = host_fingerprint()
    here = {
        **host["environment"],
        "torch": torch.__version__,
        "CPU": host["cpu"],
    }
    for name in sorted({*there, *here}):
        value = here.get(name, "unset")
        judged_value = there.get(name, "unset")
        if judged_value and value != judged_value:
            yield f"{name}: {value} here, {judged_value} where it was judged"


def expected_ratio(manifest: Manifest, portable: Manifest, num_threads: int) -> float:
    """Speed of a class's artifact relative to the portable artifact by their manifests, for a
    thread count that was judged.

    On a GPU the portable program was never judged, and counts as fast as eager.

    Raises:
        UsageError: a manifest has no speedup over eager.
    """
    ratio = _speedup_over_eager(manifest, num_threads)
    if device_class(manifest.device_class).kind == "cuda":
        return ratio
    return ratio / _speedup_over_eager(portable, num_threads)


def _speedup_over_eager(
    manifest: Manifest,
    num_threads: int,
) -> float:
    """See `LatencyRecord.speedup_with`."""
    ratio = _judged(manifest).speedup_with(num_threads)
    if ratio is None:
        raise _no_speedup(manifest)
    return ratio


def _judged(manifest: Manifest) -> LatencyRecord:
    if manifest.latency is None:
        raise _no_speedup(manifest)
    return manifest.latency


def _no_speedup(manifest: Manifest) -> UsageError:
    return UsageError(
        f"{manifest.model} for {manifest.device_class}: the manifest has no speedup over eager to"
        " compare with; judge it again on an undisturbed machine"
    )


def read_portable(folder: Path) -> Artifact:
    """Read the folder of a portable artifact.

    Raises:
        NotPublishedError, IntegrityError: it is not an artifact folder, or it is damaged.
        UsageError: the artifact is made for another class.
    """
    artifact = Artifact.read(folder)
    if artifact.manifest.device_class != PORTABLE:
        made_for = artifact.manifest.device_class
        raise UsageError(f"--portable {folder} is made for {made_for}, expected {PORTABLE}: {HOW}")
    return artifact


def fetch_portable(
    reference: str | Path,
    manifest: Manifest,
    published: tuple[Store, Version] | None,
    store: str | None,
    stack: ExitStack,
) -> Artifact:
    """Fetch the portable artifact of the same version from the store.

    Args:
        reference, store: see `load`.
        manifest: of the artifact to compare.
        published: the store and the version that `reference` names; None if it names a folder.
        stack: owns the temporary folder of fetched files.

    Raises:
        UsageError: the version has none, or no store is named for a folder.
    """
    if published is None:
        if store is None:
            raise UsageError(f"{reference}: the portable artifact is not in this folder: {HOW}")
        number = f":{manifest.version}" if manifest.version is not None else ""
        opened = Store.open(store)
        version = opened.version(f"{manifest.model}{number}")
    else:
        opened, version = published
    if PORTABLE not in version.images:
        classes = ", ".join(sorted(version.images))
        raise UsageError(
            f"{version.model} has no {PORTABLE} artifact to compare with; published are {classes};"
            f" {HOW}"
        )
    return opened.materialize(version, PORTABLE, Path(stack.enter_context(scratch_folder())))


def check_same_weights(reference: str | Path, manifest: Manifest, portable: Artifact) -> None:
    """Check that the portable artifact was made of the same weights.

    Raises:
        UsageError: it was not.
    """
    if portable.manifest.provenance.get("weights") != manifest.provenance.get("weights"):
        raise UsageError(
            f"{portable.manifest.model}: the portable artifact was made of other weights than"
            f" {reference}; {HOW}"
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
    path = artifact.folder / GOLDEN_INPUTS
    golden = golden_inputs(manifest, path, load_tensors)
    sets = []
    for golden_set, tensors in zip(manifest.golden, golden, strict=True):
        item = InputSet(point=golden_set.point, tensors=tensors)
        sets.append(item)
    distinct = distinct_at(manifest.inputs, sets, point)
    return [on_device(item, device) for item in distinct]
