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
from typing import Any

import torch

from freezer.artifact import GOLDEN_INPUTS, Artifact, LatencyRecord, Manifest
from freezer.errors import SpeedCheck, SpeedError, UsageError
from freezer.files import scratch_folder
from freezer.hardware import PORTABLE, available_cpus, device_class
from freezer.runtime.devices import CPU, host_fingerprint
from freezer.runtime.frozen_model import FrozenModel
from freezer.runtime.input_sets import InputSet, distinct_at, on_device
from freezer.runtime.tensor_files import golden_inputs, load_tensors
from freezer.runtime.torch_settings import threads
from freezer.serving.opening import open_artifact
from freezer.serving.process import LoadOptions
from freezer.spec import SamplingPolicy, bind
from freezer.store import Store, Version
from freezer.timing import meter_of, sample, speedup

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
    """Time an artifact against the portable one, in this process, as it would serve.

    Args:
        artifact: verified, and compatible with this process.
        portable: of the same model.
        num_threads: that calls may use; both are timed with the count of the payload that serves.
        policy: of the sampling.
        device: that both run on. On a GPU the portable program stands for eager.

    Raises:
        SpeedError: the ratio is below half of the expected one (the message lists differences
            here), or the machine is too busy.
        UsageError: the manifests have no speedup to compare with.
    """
    manifest, name = artifact.manifest, artifact.manifest.device_class
    point = dict(_judged(manifest).point)
    options = LoadOptions(canary=False, device=str(device))
    models = {
        item.manifest.device_class: open_artifact(item, num_threads, options)
        for item in (portable, artifact)
    }
    num_threads = models[name].payload_for(point).num_threads or num_threads
    expected = expected_ratio(manifest, portable.manifest, num_threads)
    inputs = [on_device(item, device) for item in _inputs(artifact, point)]
    reset = manifest.recipe.reset
    with threads(num_threads), meter_of(device, policy) as meter:
        calls = {entrant: _calls(model, inputs) for entrant, model in models.items()}
        resets = (
            {entrant: model.preserved[reset] for entrant, model in models.items()} if reset else {}
        )
        sampling = sample(calls, policy, resets, meter)
    if not sampling.stable:
        raise SpeedError(
            f"{manifest.model} for {name}: {sampling.problem}, expected at least"
            f" {policy.min_rounds} rounds; stop other processes on these CPUs, and try again"
        )
    ratio = speedup(sampling, name, eager=PORTABLE, num_candidates=1, policy=policy)
    found = SpeedCheck(
        device_class=name,
        expected=expected,
        measured=ratio.value,
        low=ratio.low,
        high=ratio.high,
        num_threads=num_threads,
        point=point,
        median_ms={
            entrant: statistics.median(sampling.pooled(entrant)) for entrant in sampling.samples_ms
        },
        num_rounds=sampling.num_undisturbed,
        num_dropped=sampling.num_dropped,
    )
    if found.measured < _LEAST_SHARE * expected:
        raise SpeedError(
            f"{manifest.model} for {name}: {found}; by the manifests it is {expected:.2f} times."
            " Its results are correct, at less than half of its speed. Differences here:"
            f" {'; '.join(differences(manifest, found)) or 'none found'}",
            check=found,
        )
    return found


def differences(manifest: Manifest, timed: SpeedCheck) -> Iterator[str]:
    """Differences between this process and the judge's, which may explain a slow artifact."""
    judged: Mapping[str, Any] = manifest.provenance.get("host") or {}
    here, there = host_fingerprint(), judged.get("environment") or {}
    for name in sorted({*there, *here["environment"]}):
        if (own := here["environment"].get(name, "unset")) != (other := there.get(name, "unset")):
            yield f"{name}: {own} here, {other} where it was judged"
    found = {
        _judged(manifest).num_threads,
        *(cell.num_threads for cell in _judged(manifest).points),
    }
    counts = sorted(count for count in found if count is not None)
    if counts and timed.num_threads not in counts:
        yield (
            f"threads: {timed.num_threads} here, {' or '.join(str(count) for count in counts)}"
            " where it was judged"
        )
    if (num_cpus := available_cpus()) < timed.num_threads:
        yield (
            f"threads: {timed.num_threads} share {num_cpus} CPUs, by this process's affinity or its"
            " control group's quota"
        )
    if timed.num_dropped:
        yield (
            f"load: others disturbed {timed.num_dropped} of {timed.num_rounds + timed.num_dropped}"
            " rounds"
        )
    for topic, own, other in (
        ("torch", torch.__version__, manifest.toolchain.get("torch")),
        ("CPU", here["cpu"], judged.get("cpu")),
    ):
        if other and other != own:
            yield f"{topic}: {own} here, {other} where it was judged"


def expected_ratio(manifest: Manifest, portable: Manifest, num_threads: int) -> float:
    """Speed of a class's artifact relative to the portable artifact by their manifests, for a
    thread count that was judged.

    On a GPU the portable program was never judged, and counts as fast as eager.

    Raises:
        UsageError: a manifest has no speedup over eager.
    """
    own = _speedup_over_eager(manifest, num_threads)
    return (
        own
        if device_class(manifest.device_class).kind == "cuda"
        else own / _speedup_over_eager(portable, num_threads)
    )


def _speedup_over_eager(manifest: Manifest, num_threads: int) -> float:
    """See `LatencyRecord.speedup_with`."""
    found = _judged(manifest).speedup_with(num_threads)
    if found is None:
        raise _no_speedup(manifest)
    return found


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
    found = Artifact.read(folder)
    if found.manifest.device_class != PORTABLE:
        raise UsageError(
            f"--portable {folder} is made for {found.manifest.device_class}, expected {PORTABLE}:"
            f" {HOW}"
        )
    return found


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


def _inputs(artifact: Artifact, point: Mapping[str, int]) -> list[InputSet]:
    """Distinct inputs at the judged point: golden inputs, cut or repeated to size, then generated
    ones.
    """
    manifest, golden = (
        artifact.manifest,
        golden_inputs(artifact.manifest, artifact.folder / GOLDEN_INPUTS, load_tensors),
    )
    sets = [
        InputSet(point=dict(item.point), tensors=tensors)
        for item, tensors in zip(manifest.golden, golden, strict=True)
    ]
    return distinct_at(manifest.inputs, sets, point)


def _calls(model: FrozenModel, inputs: Sequence[InputSet]) -> list[Callable[[], Any]]:
    bound = [bind(model.inputs, item.cloned()) for item in inputs]
    return [partial(model, *args, **kwargs) for args, kwargs in bound]
