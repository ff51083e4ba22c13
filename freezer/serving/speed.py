"""Speed: what serves here, timed against the portable artifact, and held to what both manifests promise.

An artifact can be right and many times too slow: its packed weights fit one instruction set and one thread count, and where oneDNN
uses another, every call converts them or runs reference kernels. The judge timed the class's payload and the portable program
against eager; the ratio of those two speedups is what is expected here, where no eager model is at hand.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from freezer.artifact.folder import GOLDEN_INPUTS, Artifact, folder_of
from freezer.artifact.manifest import Manifest
from freezer.errors import SpeedCheck, SpeedError, UsageError
from freezer.hardware.device_classes import PORTABLE, device_class
from freezer.limits import SamplingPolicy
from freezer.runtime.devices import CPU
from freezer.runtime.frozen_model import FrozenModel
from freezer.runtime.input_set import InputSet, on_device
from freezer.runtime.tensor_files import load_tensors
from freezer.runtime.threads import threads
from freezer.serving.load import open_artifact
from freezer.serving.selection import LoadOptions
from freezer.serving.speed_diagnosis import causes
from freezer.spec.inputs import bind
from freezer.store.store import Store
from freezer.timing.distinct_inputs import distinct_at
from freezer.timing.meters import meter_of
from freezer.timing.sampling import Sampling, sample, speedup

LEAST_SHARE = 0.5
"""Of the expected ratio: below it something is wrong, and not only another machine of the class."""

POLICY = SamplingPolicy(percentiles=("p50",))
"""A judge's, but for the percentiles: a ratio of medians is all that is told."""

HOW = "--store URI names the store that holds it, --portable DIR its folder (`coldpress pull --device-class portable`)"


def check_speed(
    artifact: Artifact, portable: Artifact, num_threads: int, policy: SamplingPolicy = POLICY, device: torch.device = CPU
) -> SpeedCheck:
    """Time an artifact against the portable one, in this process, as it would serve.

    Args:
        artifact: verified, and not refused here.
        portable: of the same model.
        num_threads: that calls may use; both are timed with those of the payload that serves.
        policy: of the sampling.
        device: that the artifact serves on. The portable program is timed there too: on a GPU in the place of eager.

    Raises:
        SpeedError: it is below half of what the manifests promise, with what differs here; or the machine is too busy to tell.
        UsageError: the manifests hold no figures to compare with.
    """
    manifest, name = artifact.manifest, artifact.manifest.device_class
    if manifest.latency is None:
        raise _no_figures(manifest)
    point = dict(manifest.latency.point)
    models = {
        item.manifest.device_class: open_artifact(item, num_threads, LoadOptions(canary=False, device=str(device)))
        for item in (portable, artifact)
    }
    num_threads = models[name].payload_for(point).num_threads or num_threads
    expected = expected_ratio(manifest, portable.manifest, num_threads)
    inputs = [on_device(item, device) for item in _inputs(artifact, point)]
    with threads(num_threads), meter_of(device, policy) as meter:
        calls = {name: _calls(model, inputs) for name, model in models.items()}
        sampling = sample(calls, policy, _resets(models, manifest), meter)
    rounds = len(sampling.samples_ms[name])
    if not sampling.stable:
        raise SpeedError(
            f"{manifest.model} for {name}: its speed cannot be told: {rounds} undisturbed rounds were had within the time limit, "
            f"{sampling.num_dropped} were disturbed by others, and at least {policy.min_rounds} are needed; stop what else runs on "
            "these CPUs, and try again"
        )
    found = _checked(name, expected, sampling, policy, num_threads, point)
    if found.measured < LEAST_SHARE * expected:
        serve = partial(_once, models[name], inputs, num_threads)
        differs = causes(manifest, portable.manifest, num_threads, serve, num_rounds=rounds, num_dropped=sampling.num_dropped)
        reasons = "; ".join(differs) or "nothing that can be seen from here"
        raise SpeedError(
            f"{manifest.model} for {name}: {found}; by the manifests it is {expected:.2f} times. It answers right, at less than "
            f"half of its speed. What differs here: {reasons}",
            check=found,
        )
    return found


def expected_ratio(manifest: Manifest, portable: Manifest, num_threads: int) -> float:
    """How many times as fast as the portable artifact a class's is, by their manifests, with a thread count where that was judged.

    On a GPU, where the portable program was never judged, it is taken to be as fast as eager.

    Raises:
        UsageError: one of them holds no speedup over eager.
    """
    own, base = (speedup_over_eager(item, num_threads) for item in (manifest, portable))
    if device_class(manifest.device_class).kind == "cuda":
        base = 1.0
    if own is None or base is None:
        raise _no_figures(manifest if own is None else portable)
    return own / base


def _no_figures(manifest: Manifest) -> UsageError:
    return UsageError(
        f"{manifest.model} for {manifest.device_class}: the manifest holds no speedup over eager, so there is nothing to compare "
        "with; judge it again on a machine that is not disturbed"
    )


def speedup_over_eager(manifest: Manifest, num_threads: int) -> float | None:
    """The judged speedup, with this thread count if several were; the ratio of medians where the judge was too disturbed for it."""
    latency = manifest.latency
    if latency is None:
        return None
    for cell in latency.points:
        if (cell.num_threads, cell.point) == (num_threads, latency.point) and cell.speedup:
            return cell.speedup
    if latency.speedup:
        return latency.speedup
    eager, own = latency.eager_ms.get("p50"), latency.ms.get("p50")
    return eager / own if eager and own else None


def portable_of(
    reference: str | Path, manifest: Manifest, *, store: str | None, portable: Path | None, stack: ExitStack
) -> Artifact:
    """The portable artifact of the model that an artifact was made of.

    Args:
        reference, store: as of `load`.
        manifest: of the artifact.
        portable: its folder, where it is not to be taken from the store.
        stack: what keeps fetched files as long as they are needed.

    Raises:
        UsageError: there is none, or it is of another model.
    """
    if portable is not None:
        found = Artifact.read(portable)
        if found.manifest.device_class != PORTABLE:
            raise UsageError(f"--portable {portable} is made for {found.manifest.device_class}, expected {PORTABLE}: {HOW}")
    elif folder_of(reference) is not None and store is None:
        raise UsageError(f"{reference} is compared with the portable artifact, which is not in the folder: {HOW}")
    else:
        version = f":{manifest.version}" if manifest.version is not None else ""
        name = reference if folder_of(reference) is None else f"{manifest.model}{version}"
        found = _fetched(str(name), store, stack)
    if found.manifest.provenance.get("weights") != manifest.provenance.get("weights"):
        raise UsageError(f"{found.manifest.model}: the portable artifact was made of other weights than {reference}; {HOW}")
    return found


def _fetched(name: str, store: str | None, stack: ExitStack) -> Artifact:
    opened = Store.open(store or "store")
    version = opened.version(name)
    if PORTABLE not in version.images:
        published = ", ".join(sorted(version.images))
        raise UsageError(f"{name} has no {PORTABLE} artifact to be compared with; published are {published}; {HOW}")
    return opened.materialize(version, PORTABLE, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coldpress-"))))


def _inputs(artifact: Artifact, point: Mapping[str, int]) -> list[InputSet]:
    """Distinct inputs at the point that was judged: golden ones, some cut or repeated to size, then generated ones."""
    manifest, golden = artifact.manifest, load_tensors(artifact.folder / GOLDEN_INPUTS)
    sets = [
        InputSet(point=dict(item.point), tensors={part.name: golden[f"{index}/{part.name}"] for part in manifest.inputs.tensors})
        for index, item in enumerate(manifest.golden)
    ]
    return distinct_at(manifest.inputs, sets, point)


def _calls(model: FrozenModel, inputs: Sequence[InputSet]) -> list[Callable[[], Any]]:
    bound = [bind(model.inputs, item.cloned()) for item in inputs]
    return [partial(model, *args, **kwargs) for args, kwargs in bound]


def _once(model: FrozenModel, inputs: Sequence[InputSet], num_threads: int) -> None:
    with threads(num_threads):
        _calls(model, inputs[:1])[0]()


def _resets(models: Mapping[str, FrozenModel], manifest: Manifest) -> dict[str, Callable[[], object]]:
    reset = manifest.recipe.reset
    return {name: model.preserved[reset] for name, model in models.items()} if reset else {}


def _checked(
    name: str, expected: float, sampling: Sampling, policy: SamplingPolicy, num_threads: int, point: Mapping[str, int]
) -> SpeedCheck:
    ratio = speedup(sampling, name, eager=PORTABLE, num_candidates=1, policy=policy)
    return SpeedCheck(
        device_class=name,
        expected=expected,
        measured=ratio.value,
        low=ratio.low,
        high=ratio.high,
        num_threads=num_threads,
        point=point,
        median_ms={entrant: statistics.median(sampling.pooled(entrant)) for entrant in sampling.samples_ms},
        num_rounds=len(sampling.samples_ms[name]),
        num_dropped=sampling.num_dropped,
    )
